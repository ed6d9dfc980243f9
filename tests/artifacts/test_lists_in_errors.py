"""Tests the form of lists in messages, and that it is the only one."""

from __future__ import annotations

import re

from paths import ROOT

from widepack_artifacts.errors import some


def test_some() -> None:
    assert [some("abc", most) for most in (1, 2, 3)] == ["a and 2 more", "a, b, c", "a, b, c"]
    assert some(range(1000), 3) == "0, 1, 2 and 997 more" and some([]) == ""
    assert some(["a is 1", "b is 2", "c is 3"], 1, "; ") == "a is 1; and 2 more"
    assert some(["one", "two", "three"], 1, "\n") == "one\nand 2 more"


def test_no_message_shortens_a_list_by_itself() -> None:
    """A list that is cut without a word hides how many there are."""
    shortened = re.compile(r"""['"](, |; )['"]\.join\((\w+\(.*?\)|[\w.]+)\[:\s?\w+\]\)""")
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for folder in ("widepack", "artifacts", "serve", "cli")
        for path in (ROOT / folder).rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if shortened.search(line)
    ]
    assert found == []
