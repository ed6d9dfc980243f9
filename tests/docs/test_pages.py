"""Tests that every Python block and command of README.md and docs/ runs, in order, in a new folder."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from doc_pages import RUN, blocks, run_page
from paths import ROOT

from widepack.tuning import choice

ELSEWHERE = {
    # registers an op, so it needs its own process
    "docs/how-to/your-own-ops.md": "tests/registry/test_user_ops.py",
    "docs/how-to/migrate.md": "tests/docs/test_migration.py",
    "docs/contributing/add-an-op.md": "tests/docs/test_contributing.py",  # files of the library
}
"""Pages whose code another test runs."""

SLOW = {
    "docs/how-to/checkpoints.md",
    "docs/how-to/entries-and-state.md",
    "docs/how-to/load-in-another-dtype.md",
    "docs/how-to/load-some-members.md",
    "docs/how-to/several-devices.md",
    "docs/how-to/sign.md",
    "docs/how-to/tune.md",
    "docs/how-to/update-append-drop.md",
}
"""Pages that take more than a few seconds, and have several like them."""

ALL = ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]
TEXTS = {page: (ROOT / page).read_text(encoding="utf-8") for page in ALL}
PAGES = [
    page for page in ALL if page not in ELSEWHERE and any(b.language in RUN for b in blocks(TEXTS[page]))
]
UNRUN = [(page, b) for page in ALL for b in blocks(TEXTS[page]) if b.language in RUN and b.reason]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yields an empty folder, which is the current folder, and from which modules can be imported.

    Removes these modules afterwards.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    with torch.random.fork_rng():
        yield tmp_path
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and Path(file).is_relative_to(tmp_path):
            del sys.modules[name]


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=pytest.mark.slow if p in SLOW else ()) for p in PAGES]
)
def test_the_code_of_a_page_runs(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "\nplan  " in TEXTS[page]:
        monkeypatch.setenv("WIDEPACK_BUDGET", "10")
        monkeypatch.setattr(choice, "GAIN", 1e-9)  # other load on this machine must not choose a plan
    run_page(TEXTS[page], page, folder)


def test_the_pages_that_must_have_code_have_it() -> None:
    assert len(PAGES) > 15
    assert {"README.md", "docs/tutorial/first-ensemble.md", "docs/tutorial/train-a-fused-ensemble.md"} <= set(
        PAGES
    )
    assert all((ROOT / test).is_file() for test in ELSEWHERE.values())
    assert set(ALL) >= SLOW


def test_few_blocks_are_not_run_and_each_has_a_reason() -> None:
    assert len(UNRUN) <= 10
    assert all(len(block.reason.split()) > 3 for _, block in UNRUN)


@pytest.mark.parametrize("page", ALL)
def test_every_block_is_understood(page: str) -> None:
    """`blocks` finds every block of the page, and the page has no indented command outside a block."""
    text = TEXTS[page]
    assert len(re.findall(r"^```\w", text, re.MULTILINE)) == len(blocks(text))
    outside = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert not re.search(r"^    (widepack |python |import |>>> )", outside, re.MULTILINE)
