"""Tests the documentation site: its pages, links, pictures and figures."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import as_built_chart
import pytest
import result_pages
from paths import ROOT

import results
from widepack.layers.catalog import LAYERS

PAGES = sorted((ROOT / "docs").rglob("*.md"))
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_figures_are_those_of_the_measurements() -> None:
    """If this fails, run scripts/docs/result_pages.py: bench/results has changed."""
    assert result_pages.stale() == []


def test_every_generated_part_is_used() -> None:
    texts = [(ROOT / page).read_text(encoding="utf-8") for page in result_pages.PAGES]
    assert {name for text in texts for _, name, *_ in result_pages.MARK.findall(text)} == set(results.PARTS)


def test_the_first_chart_has_the_valid_rows_alone() -> None:
    document = results.read("as-built-cpu")
    rows = results.rows_of(document)
    bad = {**rows[0], "valid": False, "ratio": {"value": 77.7, "low": 77.0, "high": 78.0}}
    good = {**rows[0], "valid": True, "ratio": {"value": 3.21, "low": 3.0, "high": 3.5}, "network": "mine"}
    text = as_built_chart.chart({**document, "rows": {"bad": bad, "good": good}})
    assert (
        ">3.21<" in text and ">mine<" in text and "77" not in text and document["environment"]["date"] in text
    )
    text = as_built_chart.CHART.read_text(encoding="utf-8")
    valid = [r for r in rows if r["valid"] and r["threads"] == 1 and r["call"] == "shared"]
    assert text.count('class="ratio"') == len(valid) + 1  # and the legend
    assert all(f">{row['ratio']['value']:.2f}<" in text for row in valid)
    assert "docs/images/as-built.svg" in README


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib: pip install 'widepack[docs]'")
def test_the_plots_have_every_line_and_bar() -> None:
    import plots

    text = plots.SPEED.read_text(encoding="utf-8")
    for name in (*plots.BASELINES.values(), *plots.NETWORKS.values()):
        assert name in text
    assert all(plots.over_members().values()) and all(plots.over_batch().values())
    text = plots.FLEETS.read_text(encoding="utf-8").replace("&quot;", '"')
    for name in (*plots.over_rows(), *plots.MEMORY.values()):
        assert name in text
    for row in plots.memory().values():
        assert all(f">{size:.0f}<" in text for size in row.values())


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "widepack/README.md", *PAGES], ids=str
)
def test_links_lead_to_files(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"[a-z]+:|#", link)]
    shown = {ROOT / "docs" / name for name in ("reference/format.md", "reference/attacks.md")}
    missing = [link for link in links if not (page.parent / link.partition("#")[0]).resolve().exists()]
    assert not missing, shown


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150
    paragraphs = re.split(r"\n\s*\n", re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL))
    long = [
        p for p in paragraphs if not p.lstrip().startswith(("|", "<", "- ", "1.")) and len(p.splitlines()) > 4
    ]
    assert not long


def test_the_page_of_layers_names_all_of_them() -> None:
    page = (ROOT / "docs/reference/api/layers.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`(Wide\w+)`", page)) - {"WideLayer"} == set(LAYERS)
    assert f"There are {len(LAYERS)}:" in (ROOT / "docs/how-to/wide-layers.md").read_text(encoding="utf-8")


def test_rooms_are_named_and_exist() -> None:
    """widepack/README.md names every room, and every room and file that it names exists."""
    page = (ROOT / "widepack/README.md").read_text(encoding="utf-8")
    tree = page[page.index("```text") : page.index("```\n\n")]
    named = set(re.findall(r"^  (\w+)/ ", tree, re.MULTILINE))
    rooms = {p.name for p in (ROOT / "widepack").iterdir() if (p / "__init__.py").is_file()}
    assert named == rooms
    for room, files in re.findall(r"^\| [^|]+ \| `(\w+)` \| ([^|]+) \|$", page, re.MULTILINE):
        assert room in rooms
        for file in re.findall(r"`([\w/]+\.py)`", files):
            assert (ROOT / "widepack" / room / file).is_file(), (room, file)
    outside = re.sub(r"^\|.*$", "", page, flags=re.MULTILINE)  # a table has paths in its rooms
    for path in re.findall(r"`(\w+/[\w/]+\.py)`", outside):
        assert (ROOT / "widepack" / path).is_file(), path


@pytest.mark.slow
@pytest.mark.skipif(find_spec("mkdocs") is None, reason="needs mkdocs: pip install 'widepack[docs]'")
def test_the_site_builds(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stderr
    command_line = (tmp_path / "site/reference/cli.html").read_text(encoding="utf-8")
    assert "widepack build" in command_line and "--max-shard-size" in command_line
