"""Tests that the rows of artifacts/ATTACKS.md match the tests of attacks."""

from __future__ import annotations

import re
from pathlib import Path

from paths import ROOT

ATTACKS = ROOT / "artifacts" / "ATTACKS.md"


def test_the_page_and_the_tests_have_the_same_numbers() -> None:
    rows = re.findall(r"^\| (\d+) \|.*`(test_\d+\w+)`", ATTACKS.read_text(encoding="utf-8"), re.MULTILINE)
    texts = [p.read_text(encoding="utf-8") for p in Path(__file__).parent.glob("test_attacks_*.py")]
    tests = sorted(name for text in texts for name in re.findall(r"^def (test_\d+_\w+)", text, re.MULTILINE))
    tests.remove("test_00_unchanged_forged_artifacts_load")
    assert [name for _, name in rows] == tests
    assert [int(number) for number, _ in rows] == list(range(1, len(tests) + 1))
