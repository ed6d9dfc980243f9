"""Tests that artifacts/ATTACKS.md and the tests of attacks name the same tests."""

from __future__ import annotations

import re
from pathlib import Path

from paths import ROOT

ATTACKS = ROOT / "artifacts" / "ATTACKS.md"
NO_ATTACKS = {
    "test_an_honest_record",
    "test_unchanged_forged_artifacts_load",
    "test_wrong_arguments_of_a_load_are_usage_errors",
}


def sections() -> dict[int, list[str]]:
    """Returns for each attack of the page the files of its tests."""
    files: dict[int, list[str]] = {}
    for section in ATTACKS.read_text(encoding="utf-8").split("\n## ")[1:]:
        named = re.search(r"^Tests: (.+?\.)$", section, re.MULTILINE)
        for number in re.findall(r"^(\d+)\. \*\*", section, re.MULTILINE):
            assert named, f"the section of attack {number} names no file of tests"
            files[int(number)] = re.findall(r"`(\S+\.py)`", named[1])
    return files


def rows() -> list[tuple[int, list[str]]]:
    """Returns the rows of the table of tests: the number of an attack, and the names of its tests."""
    found = re.findall(r"^\| (\d+) \| (`test_.+`) \|$", ATTACKS.read_text(encoding="utf-8"), re.MULTILINE)
    return [(int(number), re.findall(r"`(test_\w+)`", names)) for number, names in found]


def test_each_attack_of_the_page_has_one_row_of_tests() -> None:
    numbers = [number for number, _ in rows()]
    assert numbers == list(sections()) == list(range(1, len(numbers) + 1))


def test_the_page_names_every_test_of_an_attack_once() -> None:
    named = sorted(name for _, names in rows() for name in names)
    texts = [p.read_text(encoding="utf-8") for p in Path(__file__).parent.glob("test_attacks_*.py")]
    tests = {name for text in texts for name in re.findall(r"^def (test_\w+)", text, re.MULTILINE)}
    # tests in files of other rooms are compared with the files that their section names, below
    assert [name for name in named if name in tests] == sorted(tests - NO_ATTACKS) and tests >= NO_ATTACKS
    assert len(named) == len(set(named))


def test_each_test_is_in_a_file_that_the_section_names() -> None:
    files = sections()
    for number, names in rows():
        text = "\n".join((ROOT / path).read_text(encoding="utf-8") for path in files[number])
        missing = [name for name in names if f"def {name}(" not in text]
        assert not missing, f"attack {number}: {missing} not in {files[number]}"
