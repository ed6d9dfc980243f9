"""Tests patterns of adapters against Python's `re`, which PEFT uses."""

from __future__ import annotations

import random
import re
import time

import pytest

from widepack.fleet.name_patterns import NamePattern, name_pattern

NAMES = [
    "",
    "a",
    "b",
    "aa",
    "ab",
    "a.b",
    "b.a",
    "aab",
    "a.a.b",
    "ba.ab",
    ".",
    "a.",
    ".a",
    "1",
    "a1",
    "a.1.b",
    "_",
]


def expected(pattern: str, name: str) -> bool:
    return re.match(rf"(.*\.)?({pattern})$", name) is not None


def drawn(draw: random.Random, depth: int = 0) -> str:
    """Returns a pattern of all constructs that are read."""
    parts = []
    for _ in range(draw.randrange(4)):
        kind = draw.random()
        if kind < 0.2 and depth < 3:
            atom = f"({draw.choice(('', '?:'))}{drawn(draw, depth + 1)})"
        elif kind < 0.27:
            parts.append(draw.choice("^$"))
            continue
        else:
            atom = draw.choice(
                ("a", "b", "a", "b", ".", r"\.", r"\d", r"\w", "[ab]", "[a-z1]", r"[\d.]", "1", "_")
            )
        parts.append(atom + draw.choice(("", "", "", "*", "+", "?", "*?")))
    text = "".join(parts)
    return f"{text}|{drawn(draw, depth + 1)}" if draw.random() < 0.2 and depth < 3 else text


def test_drawn_patterns_match_as_in_peft() -> None:
    draw = random.Random(time.time_ns())
    matched = 0
    for _ in range(1500):
        pattern = drawn(draw)
        if len(pattern) > 60:
            continue
        found = NamePattern(pattern)
        names = [*NAMES, *("".join(draw.choices("ab.1_\n", k=draw.randrange(7))) for _ in range(5))]
        for name in names:
            if name.endswith("\n"):  # `$` also matches before the last line break
                continue
            assert found.matches(name) == expected(pattern, name), (pattern, name)
            matched += found.matches(name)
    assert matched > 1000


@pytest.mark.parametrize(
    ("pattern", "name", "right"),
    [
        ("q_proj", "model.layers.0.q_proj", True),
        ("q_proj", "model.layers.0.xq_proj", False),
        (r"layers\.(0|1)\.q", "model.layers.1.q", True),
        (r"layer\.1.*dense", "bert.encoder.layer.10.output.dense", True),
        ("^model.q", "model.q", True),
        ("^q", "model.q", False),
        (r"layers\.\d+\.(q|k|v)_proj$", "m.layers.17.v_proj", True),
        ("[0-9]", "layers.3", True),
    ],
)
def test_patterns_as_people_write_them(pattern: str, name: str, right: bool) -> None:
    assert name_pattern(pattern).matches(name) == expected(pattern, name) == right


@pytest.mark.parametrize(
    "pattern",
    ["(a|aa)" * 33, "(a+)+" * 10, "(a*)*b", "(a|a)*" * 20, ".*" * 100, "(.*.*)+" * 20, "a?" * 50 + "a" * 50],
)
def test_no_pattern_takes_exponential_time(pattern: str) -> None:
    begin = time.process_time()
    found = name_pattern(pattern)
    for name in ("a" * 50, "a" * 33 + "c", "a." * 500 + "c", "a" * 2000):
        found.matches(name)
    assert time.process_time() - begin < 2


@pytest.mark.parametrize(
    "pattern",
    [
        "(",
        ")",
        "(a",
        "a)",
        "*",
        "a**",
        "a*+",
        "(?=a)",
        "(?P<n>a)",
        "a{3}",
        "[",
        "[]",
        "[^a]",
        "\\1",
        "\\b",
        "^*",
        "[b-a]",
        "\\",
    ],
)
def test_other_constructs_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="it "):
        NamePattern(pattern)
