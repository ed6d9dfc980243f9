"""Tests attacks 60, 61 and 65 of ATTACKS.md: operands that lead a kernel outside its tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from attacks import SELF, refused
from forged import Forged, golden, node, ref

from widepack import InputError, load

INT = {"dtype": "int64"}
INT32 = {"dtype": "int32"}


def numbers(name: str, *values: int, dtype: dict[str, str] = INT) -> list[dict[str, Any]]:
    """Returns nodes that create a tensor of these numbers without an input."""
    parts = [
        node(f"{name}{i}", "aten.full.default", [1], v, dtype=dtype, device=SELF)
        for i, v in enumerate(values)
    ]
    return [*parts, node(name, "aten.cat.default", [ref(f"{name}{i}") for i in range(len(values))])]


def floats(name: str, *shape: int) -> dict[str, Any]:
    return node(name, "aten.full.default", list(shape), 1.0, device=SELF)


BAD: dict[str, tuple[list[dict[str, Any]], str]] = {
    "segments": (
        [
            floats("d", 4),
            *numbers("o", 0, 4000),
            node("a", "aten.segment_reduce.default", ref("d"), {"str": "sum"}, offsets=ref("o")),
        ],
        "offsets contains 4000",
    ),
    "bags": (
        [
            floats("d", 4, 2),
            *numbers("i", 0, 1),
            *numbers("o", 0, 10**6),
            node("a", "aten._embedding_bag_forward_only.default", ref("d"), ref("i"), ref("o")),
        ],
        "offsets contains 1000000",
    ),
    "pivots": (
        [
            floats("d", 3, 3),
            *numbers("p", 0, 1, 2**30, dtype=INT32),
            node("a", "aten.lu_unpack.default", ref("d"), ref("p")),
        ],
        "LU_pivots contains 0",
    ),
    "an LSTM": (
        [
            floats("x", 2, 2, 3),
            floats("h", 1, 1, 4),
            floats("w", 16, 3),
            floats("v", 16, 4),
            node(
                "a",
                "aten.lstm.input",
                ref("x"),
                [ref("h"), ref("h")],
                [ref("w"), ref("v")],
                False,
                1,
                0.0,
                False,
                False,
                False,
            ),
        ],
        r"hx[0] is [1, 1, 4]; [1, 2, 4] is needed",
    ),
    "a packed weight": (
        [
            floats("w", 2, 4, 4),
            floats("x", 1, 8, 1, 1),
            node("p", "widepack.pack_linear.default", ref("w"), 2),
            node("a", "widepack.convolution.default", ref("x"), ref("p"), None, [1, 1], [0, 0], [1, 1], 2),
        ],
        "was packed for",
    ),
}


def renamed(nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Renames the nodes, so that no name occurs in the golden programs."""
    names = {n["name"]: f"forged_{n['name']}" for n in nodes}

    def to(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: names.get(v, v) if k == "ref" else to(v) for k, v in value.items()}
        return [to(v) for v in value] if isinstance(value, list) else value

    return [{**to(n), "name": names[n["name"]]} for n in nodes]


@pytest.mark.parametrize("name", BAD)
def test_operands_that_lead_a_kernel_outside_of_its_tensors(name: str, tmp_path: Path) -> None:
    nodes, message = BAD[name]
    refused(Forged().add(*renamed(nodes)).save(tmp_path), message)


def test_operands_that_lead_outside_only_at_the_sizes_of_a_call(tmp_path: Path) -> None:
    """The offsets depend on the batch. They are valid at load and invalid at a call with more rows."""
    bad = [
        floats("d", 64),
        node("b", "aten.sym_size.int", ref("x"), 0),
        node("o0", "aten.full.default", [1], 0, dtype=INT, device=SELF),
        node("o1", "aten.full.default", [1], ref("b"), dtype=INT, device=SELF),
        node("o", "aten.cat.default", [ref("o0"), ref("o1")]),
        node("a", "aten.segment_reduce.default", ref("d"), {"str": "sum"}, offsets=ref("o")),
    ]
    ens = load(Forged().add(*renamed(bad)).save(tmp_path))
    assert ens(torch.zeros(64, 6)).shape[:2] == (3, 64)
    with pytest.raises(InputError, match="offsets contains 65; 0 to 64 are possible"):
        ens(torch.zeros(65, 6))


def test_memory_that_no_node_wrote_is_zero(tmp_path: Path) -> None:
    """The answers are the golden ones plus memory that no node writes."""
    forged = Forged()
    for program in forged.programs():
        answer = program["outputs"][0][0]
        memory = node("forged_e", "aten.empty_like.default", answer)
        program["nodes"] += [memory, node("forged_y", "aten.add.Tensor", answer, ref("forged_e"))]
        program["outputs"][0][0] = ref("forged_y")
    ens, wanted = load(forged.save(tmp_path)), load(golden("mlp"))
    for rows in (1, 4, 7, 64):
        x = torch.randn(rows, 6)
        assert torch.equal(ens(x), wanted(x))


def test_a_view_of_the_memory_around_an_input(tmp_path: Path) -> None:
    row = node("forged_r", "aten.select.int", ref("x"), 0, 0)
    around = node("forged_s", "aten._reshape_alias.default", ref("forged_r"), [2, 6], [6, 1])
    refused(Forged().add(row, around).save(tmp_path), "invalid for input of size 6")
    inverse = node("forged_s", "aten.slice_inverse.default", ref("x"), ref("x"), 0)
    refused(Forged().add(inverse).save(tmp_path), "not on the list of allowed ops")
