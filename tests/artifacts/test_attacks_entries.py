"""Tests attacks 19 to 25 of ATTACKS.md: guards, dims, inputs, and the budget of a load."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
from attacks import BIG, SELF, X, refused, wide
from forged import Forged, node, ref

from widepack import load
from widepack_artifacts import guards


@pytest.mark.parametrize(
    "expr",
    [
        ["add"] + [["add", 1, 1]] * 2 + [1],
        ["eval", 1, 2],
        ["pow", 2, 2**62],
        [["add"], 1, 2],
        ["add", 1.5, 2],
        ["add", True, 2],
        {"add": 1},
        "Q",
        ["not"],
        2**63,
    ],
)
def test_guards_that_are_not_conditions_on_sizes(tmp_path: Path, expr: Any) -> None:
    forged = Forged()
    forged.entry["guards"] = [{"expr": expr, "source": ""}]
    refused(forged.save(tmp_path), "guard" if expr != 2**63 else "64 bits")


def test_guards_that_are_too_large(tmp_path: Path) -> None:
    deep: Any = "B"
    for _ in range(90):
        deep = ["mul", deep, "B"]
    forged = Forged()
    forged.entry["guards"] = [{"expr": deep, "source": ""}]
    refused(forged.save(tmp_path / "deep"), "nested over 64 deep")
    many: Any = "B"
    for _ in range(11):
        many = ["add", many, copy.deepcopy(many)]
    forged.entry["guards"] = [{"expr": many, "source": ""}]
    refused(forged.save(tmp_path / "many"), "over 1000 terms")
    power: Any = "B"
    for _ in range(60):
        power = ["mul", power, 2**62]
    forged.entry["guards"] = [
        {"expr": ["ge", power, 0], "source": ""}
    ]  # a size of more than 64 bits: the guard fails fast
    refused(forged.save(tmp_path / "power"), "the probe does not match its inputs")
    assert guards.holds(power, {"B": 2}) is False


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"min": 2**62}, "the probe does not match its inputs"),
        ({"min": 5, "max": 4}, "from 5 to 4 is empty"),
        ({"min": -1}, "expected a count"),
        ({"max": 2**63}, "outside 64 bits"),
        ({"example": 1.5}, "expected a count"),
    ],
)
def test_dims_with_impossible_bounds(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    forged = Forged()
    forged.entry["dims"]["B"].update(change)
    refused(forged.save(tmp_path), words)


@pytest.mark.parametrize(
    "type_",
    [
        "float32[B,9223372036854775807]",
        "float32[99999999999999999999]",
        "object[B,6]",
        "float32[2000000000*B,6]",
        "float32[" + ",".join("1" * 70) + "]",
        "float32[B,-6]",
    ],
)
def test_inputs_of_impossible_types(tmp_path: Path, type_: str) -> None:
    forged = Forged()
    forged.entry["inputs"][0]["type"] = type_
    forged.entry["wide"] = []  # without wide programs, only the example gives sizes
    forged.manifest["probe"] = ""
    refused(forged.save(tmp_path))


def growing() -> list[dict[str, Any]]:
    """Returns nodes with small sizes, whose size expressions double at every step."""
    nodes: list[dict[str, Any]] = [node("n0", "aten.sym_size.int", X, 0)]
    for i in range(70):
        nodes.append(node(f"h{i}", "operator.floordiv", ref(f"n{i}"), 2))
        nodes.append(node(f"m{i}", "operator.mod", ref(f"n{i}"), 7))
        nodes.append(node(f"n{i + 1}", "operator.add", ref(f"h{i}"), ref(f"m{i}")))
    return nodes


@pytest.mark.parametrize(
    "nodes",
    [
        [node("a", "operator.pow", 10**18, 10**18)],
        [node("a", "aten.zeros.default", [BIG], device=SELF)],
        pytest.param(growing(), id="growing"),
    ],
)
def test_enormous_sizes_in_a_program_that_is_lowered_at_load(
    tmp_path: Path, nodes: list[dict[str, Any]]
) -> None:
    """A load without wide programs lowers the member program and refuses enormous sizes."""
    forged = Forged().add(*nodes, start="programs/member.")
    forged.entry["wide"] = []
    refused(forged.save(tmp_path))


def test_all_entries_of_a_load_share_one_budget(tmp_path: Path) -> None:
    step = [*wide(X, 2**10), *[node(f"n{i}", "aten.sin.default", ref("e")) for i in range(30)]]
    forged = Forged().add(*step)
    load(forged.save(tmp_path / "one"), limit=0.05)
    forged.manifest["entries"].update({f"other{i}": copy.deepcopy(forged.entry) for i in range(12)})
    forged.manifest["probe"] = ""
    refused(forged.save(tmp_path / "many"), "the work of this load", limit=0.05)


def test_the_limit_of_a_load_can_be_raised(tmp_path: Path) -> None:
    path = Forged().add(node("a", "aten.zeros.default", [2_000_000], device=SELF)).save(tmp_path)
    text = refused(path, "may take 2.7 MB when it is loaded", "load(limit=", limit=0.01)
    found = re.search(r"load\(limit=([0-9.e+-]+)\)", text)
    assert found
    load(path, limit=float(found[1]))
    load(path)
    load(path, limit=None)
