"""`widepack compile`: compiles the programs of an artifact, into the user's cache or into a folder for an
image.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from widepack_bench.text import columns, plural, size

from ..shared.options import ARTIFACT, emit, entry_named, entry_option, example, json_option, stdout_kept
from ..shared.progress_bar import Progress

PATTERNS = {"shared": ("shared",), "each": ("each",), "both": ("shared", "each")}


@click.command(
    epilog=example(
        "widepack compile ens.wide",
        "widepack compile ens.wide -o compiled --pattern shared   # then WIDEPACK_CACHE=compiled",
        "widepack compile ens.wide --backend onnxruntime --json",
    )
)
@ARTIFACT
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="The folder to write, for example for a container image. To use it: load(cache=DIR) or "
    "WIDEPACK_CACHE=DIR. Default: the user's cache.",
)
@click.option(
    "--backend",
    type=click.Choice(["aot", "onnxruntime"]),
    default="aot",
    show_default=True,
    help="The backend: AOTInductor or ONNX Runtime.",
)
@click.option(
    "--pattern",
    type=click.Choice(list(PATTERNS)),
    default="both",
    show_default=True,
    help="shared: programs for one set of inputs for all members. each: for a separate set for each "
    "member. both: all of them.",
)
@entry_option
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    help="Threads with which the compiled programs are checked. They run with any number of threads.",
)
@json_option
def command(
    artifact: Path,
    out: Path | None,
    backend: str,
    pattern: str,
    entry: str,
    threads: int | None,
    as_json: bool,
) -> None:
    """Compile ARTIFACT's programs for this machine. Then load(backend="aot") starts at once and needs no
    compiler.

    Programs that are in the cache already are not compiled again. Every program is compared with the eager
    one at several sizes, and with the artifact's probe, before it is kept. The code is for the instruction
    set of this processor and this build of torch; other machines do not load it.
    """
    from widepack_artifacts.reader import Reader

    entries = Reader(artifact).manifest.entries
    names = [entry_named(entries, entry, "")] if entry else list(entries)
    if out is not None and not out.exists():
        out.mkdir(parents=True)
        out.chmod(0o755)  # a folder that a group may write to would be refused, so the umask must not decide
    with stdout_kept(as_json), Progress() as progress:
        document = _compiled(artifact, out, backend, PATTERNS[pattern], names, threads, progress)
    if as_json:
        emit(document)
    else:
        click.echo("\n".join(_lines(document)))


def _compiled(
    artifact: Path,
    out: Path | None,
    backend: str,
    patterns: Sequence[str],
    entries: Sequence[str],
    threads: int | None,
    progress: Progress,
) -> dict[str, Any]:
    """Compiles the programs and returns the document of the command."""
    import torch

    import widepack
    from widepack.system.compiled_cache import default_folder

    stages: list[str] = []

    def report(stage: str, done: int, total: int) -> None:
        stages.append(stage)
        progress(stage, done, total)

    ens = widepack.load(
        artifact, backend=backend, compile="now", cache=out, warmup=False, threads=threads, progress=report
    )
    rows = []
    for name in entries:
        for pattern in patterns:
            stages.clear()
            start = time.monotonic()
            places = ens.entry(name).compiled(pattern)
            rows.append(
                {
                    "entry": name,
                    "pattern": pattern,
                    "programs": len(places),
                    "compiled": len(stages),
                    "seconds": round(time.monotonic() - start, 3),
                    "bytes": sum(f.stat().st_size for p in set(places) for f in p.iterdir()),
                }
            )
    return {
        "path": str(artifact),
        "backend": backend,
        "folder": str(out or default_folder()),
        "torch": torch.__version__,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "programs": rows,
    }


def _lines(document: dict[str, Any]) -> list[str]:
    """Returns the document as lines of text."""
    rows = document["programs"]
    table = [["entry", "pattern", "programs", "", "size", "seconds"]]
    table += [
        [
            r["entry"],
            r["pattern"],
            str(r["programs"]),
            f"{r['compiled']} compiled" if r["compiled"] else "in the cache",
            size(r["bytes"]),
            f"{r['seconds']:.1f}",
        ]
        for r in rows
    ]
    count = plural(sum(r["programs"] for r in rows), "program")
    return [
        *columns(table),
        f"{count} for {document['backend']} in {document['folder']}, torch {document['torch']}, "
        f"{document['instructions']}",
    ]
