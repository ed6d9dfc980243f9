"""Tests drawn modules with hooks, closures, partials, patched forwards, parametrizations and shared parts.

Each is fused, trained, built, extracted and swapped, and compared with its members alone. The seeds are drawn
anew in each run and named in a failure. WIDEPACK_DRAWN_SEED sets the first one.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path

import pytest
from drawn_checks import build_extract_swap, fuse_and_train, fuse_copies, refusal
from drawn_modules import PARTS, Drawn, drawn

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's old weight_norm warns, and so does a lone factory

_FIRST = int(os.environ.get("WIDEPACK_DRAWN_SEED", random.SystemRandom().randrange(10**6)))
_REFUSED = {"no reset_parameters() to initialize them again": fuse_copies}
"""What is refused, and by which check. docs/reference/limits.md lists the same."""


def check(kind: Drawn, folder: Path) -> Counter[str]:
    """Runs the checks of one module and returns its refusals by kind. Copies and artifacts take turns."""
    print(f"WIDEPACK_DRAWN_SEED={_FIRST}: {kind}")
    refused: Counter[str] = Counter()
    note("fuse", kind, refusal(fuse_and_train, kind), refused)
    if kind.seed % 2:
        note("fuse(n=3)", kind, refusal(fuse_copies, kind), refused)
        return refused
    note("build", kind, refusal(build_extract_swap, kind, folder), refused)
    return refused


def note(check_name: str, kind: Drawn, message: str, refused: Counter[str]) -> None:
    if message:
        known = [words for words in _REFUSED if words in message]
        assert known, f"{check_name} refuses {kind}: {message}"
        refused[known[0]] += 1


@pytest.mark.extended(keep=2)
@pytest.mark.parametrize("number", range(60))
def test_a_drawn_module_is_right_or_refused(number: int, tmp_path: Path) -> None:
    check(drawn(_FIRST + number), tmp_path)


@pytest.mark.slow
def test_500_drawn_modules(tmp_path: Path) -> None:
    refused: Counter[str] = Counter()
    for number in range(500):
        folder = tmp_path / str(number)
        folder.mkdir()
        refused += check(drawn(_FIRST + 1000 + number), folder)
    print(dict(refused))
    # copies with fresh weights need a factory where a part cannot draw its own; members and files do not
    del refused["no reset_parameters() to initialize them again"]
    assert refused.total() <= 25, refused


@pytest.mark.extended(keep=0)
@pytest.mark.parametrize("name", sorted(PARTS))
def test_each_part_by_itself(name: str, tmp_path: Path) -> None:
    kind = Drawn(_FIRST, (name,))
    message = refusal(fuse_and_train, kind)
    assert not message, f"{kind}: {message}"
