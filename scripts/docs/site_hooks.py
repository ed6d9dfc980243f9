"""Extends the documentation site: adds the pages outside docs/, and turns links between files into links of
the site.

Every link in a Markdown file is relative to that file, so that it works in the repository. The site has other
paths for some files. So each link is resolved first to a file of the repository, and then to the page that
shows the file.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]

PAGES = {
    "artifacts/FORMAT.md": "reference/format.md",
    "artifacts/ATTACKS.md": "reference/attacks.md",
    "bench/README.md": "reference/benchmarks.md",
    "bench/results/zoo-exceptions.md": "results/zoo-exceptions.md",
    "CONTRIBUTING.md": "contributing/index.md",
    "CHANGELOG.md": "contributing/changelog.md",
    "SECURITY.md": "contributing/security.md",
    "widepack/README.md": "contributing/rooms.md",
}
"""Maps a file outside docs/ to the page of the site that shows it."""

DATA = (
    "bench/results/*.json",
    "bench/widepack_bench/schema.json",
    "examples/deploy/Dockerfile",
    "examples/deploy/*.service",
    "examples/deploy/*.yaml",
    "examples/serve/*.py",
    "LICENSE",
)
"""Files that pages link to. The site has them under data/."""

LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s]+)(\))")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages and data files that live outside docs/."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    for pattern in DATA:
        for path in sorted(ROOT.glob(pattern)):
            files.append(File.generated(config, f"data/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrites links to files of the repository as links to pages of the site, outside of code blocks."""
    here = page.file.src_uri
    source = next((s for s, p in PAGES.items() if p == here), f"docs/{here}")
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(p if p.startswith("```") else LINK.sub(lambda m: _link(m, source, here), p) for p in parts)


def _link(match: re.Match[str], source: str, here: str) -> str:
    start, target, end = match.groups()
    if re.match(r"[a-z]+:|#", target):
        return match.group(0)
    path, hash_, anchor = target.partition("#")
    file = os.path.normpath(os.path.join(os.path.dirname(source), path))
    return f"{start}{os.path.relpath(_page_of(file), os.path.dirname(here) or '.')}{hash_}{anchor}{end}"


def _page_of(file: str) -> str:
    """Returns the path in the site of a file of the repository. For a file that the site does not show, it
    returns a path that mkdocs reports.
    """
    if file in PAGES:
        return PAGES[file]
    if file == "README.md":
        return "index.md"
    if file.startswith("docs/"):
        return file.removeprefix("docs/")
    if any(Path(file).match(pattern) for pattern in DATA):
        return f"data/{Path(file).name}"
    return f"not-in-the-site/{file}"


def on_pre_build(config: Any) -> None:
    """Sets the name of each command. All functions are called `command`, and mkdocs-click reads the name of
    the function.
    """
    import click

    from widepack_cli.main import cli

    context = click.Context(cli)
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        if command is not None:
            command.name = name
