"""Tests the checks of values before compiled code: they count only if that code has the same values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from widepack.kernels.checks import OperandError
from widepack.runtime.value_checks import ValueChecks
from widepack_artifacts.program import Kind, Node, Output, Program, Ref, Slot, Tag

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


def bags(table: Slot, ids: Any, **at_top: Node) -> ValueChecks:
    """Returns the checks of a loop over two members, each of which looks up `ids` in its own table."""
    bag = Node("y", "aten.embedding_bag.default", (Ref("t"), Ref("n"), Ref("o")))
    inner = Node("z", "operator.getitem", (Ref("y"), 0))
    kinds: dict[str, Kind] = {"t": "stacked", "n": "shared", "o": "shared"}
    slots = tuple(Slot(name, "", kind, "") for name, kind in kinds.items())
    body = Program((), slots, (bag, inner), (Output(Ref("z"), "stacked"),), 1)
    loop = Node("y", "", (Ref("t"), ids, Ref("o")), body=body)
    inputs = (Slot("n", "n", "shared", "int64[3]"), Slot("o", "o", "shared", "int64[1]"))
    program = Program((table,), inputs, (*at_top.values(), loop), (Output(Ref("y"), "stacked"),), 2)
    return ValueChecks(program, lambda: [torch.ones(2, 4, 5)])


def test_ids_of_a_bag_in_a_loop_are_checked_for_the_table_of_one_member() -> None:
    """A node in the loop may have the name of the loop, and of values outside of it."""
    run = bags(Slot("t", "t", "stacked", "float32[4,5]"), Ref("n"))
    assert run.possible and run.needed
    given = run.before(lambda n, o: "compiled", lambda n, o: "eager")
    assert given(torch.tensor([0, 3, 1]), torch.tensor([0])) == "compiled"
    with pytest.raises(OperandError, match="indices contains 4"):
        given(torch.tensor([0, 4, 1]), torch.tensor([0]))


def test_a_name_of_two_values_is_not_checked() -> None:
    """The check would read one of them, and the compiled code the other."""
    other = Node("y_y_0", "aten.mul.Tensor", (Ref("n"), 0))
    assert not bags(Slot("t", "t", "stacked", "float32[4,5]"), Ref("y_y_0"), other=other).possible
