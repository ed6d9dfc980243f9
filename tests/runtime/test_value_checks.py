"""Tests the checks of values before compiled code: they count only if that code has the same values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from widepack.kernels.checks import OperandError
from widepack.runtime.value_checks import ValueChecks
from widepack_artifacts.program import Node, Output, Program, Ref, Slot, Tag

INT = {"dtype": Tag("dtype", "int64")}


def checks(*before: Node) -> ValueChecks:
    """Returns the checks of segments of `d`, whose offsets the nodes compute from the input `i`."""
    sums = Node("a", "aten.segment_reduce.default", (Ref("d"), "sum"), {"offsets": Ref("o")})
    weights, inputs = (Slot("d", "d", "shared", "float32[4]"),), (Slot("i", "i", "shared", "int64[2]"),)
    program = Program(weights, inputs, (*before, sums), (Output(Ref("a"), "shared"),), 1)
    return ValueChecks(program, lambda: [torch.ones(4)])


def nodes(op: str, *args: Any, **kwargs: Any) -> list[Node]:
    """Returns a node that claims to return integers, and one that converts its result."""
    return [
        Node("f", op, args, kwargs, "int64[2]"),
        Node("o", "aten._to_copy.default", (Ref("f"),), INT, "int64[2]"),
    ]


def test_operands_of_integer_arithmetic_are_checked() -> None:
    run = checks(*nodes("aten.mul.Tensor", Ref("i"), 2))
    assert run.possible and run.needed
    given = run.before(lambda i: "compiled", lambda i: "eager")
    assert given(torch.tensor([0, 2])) == "compiled"
    with pytest.raises(OperandError, match="offsets contains 6"):
        given(torch.tensor([0, 3]))


@pytest.mark.parametrize(
    "before",
    [
        nodes("aten.mul.Tensor", Ref("i"), 2.0),
        nodes("aten.div.Tensor", Ref("i"), Ref("i")),
        nodes("aten.new_empty.default", Ref("i"), [2], **INT),
        nodes("aten.empty_like.default", Ref("i")),
    ],
    ids=["floats", "quotients", "memory", "like memory"],
)
def test_operands_that_compiled_code_may_compute_otherwise_run_eagerly(before: list[Node]) -> None:
    """The file calls the values integers; only the values themselves tell what they are."""
    run = checks(*before)
    assert run.possible
    assert run.before(lambda i: "compiled", lambda i: "eager")(torch.tensor([0, 1])) == "eager"
