"""Tests that compiled programs notice an index that is out of range, and that the flat graph then runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bound_tasks import task_of
from torch import Tensor

from widepack.backends.flat import Flat, flatten
from widepack.backends.index_flags import is_flagged
from widepack.backends.tracing import with_weights
from widepack.backends.variants import Checked, Variant
from widepack.ir import ops
from widepack_artifacts.program import Node, Output, Program, Ref, Slot

CPU = torch.device("cpu")
X, ROWS = Ref("x"), Ref("i")
OPS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "aten.embedding.default": ((X, ROWS), {}),
    "aten.gather.default": ((X, 0, ROWS), {}),
    "aten.index.Tensor": ((X, [None, ROWS]), {}),
    "aten.index_add.default": ((X, 1, Ref("j"), X), {}),
    "aten.index_copy.default": ((X, 1, Ref("j"), X), {}),
    "aten.index_fill.int_Scalar": ((X, 1, Ref("j"), 2.0), {}),
    "aten.index_put.default": ((X, [ROWS], Ref("y")), {"accumulate": True}),
    "aten.index_reduce.default": ((X, 1, Ref("j"), X, "amax"), {}),
    "aten.index_select.default": ((X, 1, Ref("j")), {}),
    "aten.one_hot.default": ((ROWS, 4), {}),
    "aten.scatter.value": ((X, 0, ROWS), {"value": 2.0}),
    "aten.scatter_add.default": ((X, 1, ROWS, Ref("y")), {}),
    "aten.scatter_reduce.two": ((X, 1, ROWS, Ref("y"), "sum"), {}),
    "aten.take_along_dim.default": ((X, ROWS, 1), {}),
}
NEGATIVE = ("aten.index.Tensor", "aten.index_put.default", "aten.index_fill.int_Scalar")
GIVEN: dict[str, Tensor] = {"x": torch.arange(16.0).view(4, 4), "y": torch.ones(4, 4)}
TYPES = {"x": "float32[4,4]", "y": "float32[4,4]", "i": "int64[4,2]", "j": "int64[4]"}


def flat(op: str) -> Flat:
    args, kwargs = OPS[op]
    inputs = tuple(Slot(n, n, "shared", t) for n, t in TYPES.items())
    program = Program((), inputs, (Node("a", op, args, kwargs),), (Output(Ref("a"), "shared"),), 1)
    return flatten(program, [], "aot", "it")


def call(op: str, low: int, high: int) -> list[Tensor]:
    rows = torch.tensor([low, 1, 2, high])
    if op == "aten.index_put.default":
        return [GIVEN["x"], torch.ones(4, 2, 4), rows.repeat(2).view(4, 2), rows]
    return [GIVEN["x"], GIVEN["y"], rows.repeat(2).view(4, 2), rows]


def direct(op: str, inputs: list[Tensor]) -> Tensor:
    values = dict(zip(TYPES, inputs))

    def to(value: Any) -> Any:
        if isinstance(value, list):
            return [to(v) for v in value]
        return values[value.name] if isinstance(value, Ref) else value

    args, kwargs = OPS[op]
    result: Tensor = ops.resolve(op)(*map(to, args), **kwargs)
    return result


@pytest.mark.parametrize("op", OPS)
def test_indices_in_range_give_the_answer_and_others_a_flag(op: str) -> None:
    whole = flat(op)
    assert is_flagged(whole.program)
    run, _ = with_weights(whole, CPU, {})
    result, flag = run(*call(op, 0, 3))
    torch.testing.assert_close(result, direct(op, call(op, 0, 3)))
    assert not flag
    for low, high in ((0, 4), (-5, 3), (0, 2**62), (-(2**63), 3)):
        assert run(*call(op, low, high))[1], (low, high)
    assert bool(run(*call(op, -1, 3))[1]) == (op not in NEGATIVE)


def test_a_mask_is_no_index() -> None:
    nodes = (Node("a", "aten.index_put.default", (X, [Ref("m")], Ref("y"))),)
    types = {"x": "float32[4]", "m": "bool[4]", "y": "float32[]"}
    inputs = tuple(Slot(n, n, "shared", t) for n, t in types.items())
    run, _ = with_weights(
        flatten(Program((), inputs, nodes, (Output(Ref("a"), "shared"),), 1), [], "aot", ""), CPU, {}
    )
    result, flag = run(torch.zeros(4), torch.tensor([True, False, True, False]), torch.tensor(2.0))
    assert result.tolist() == [2, 0, 2, 0] and not flag


@pytest.mark.parametrize("wrong", [False, True])
def test_the_flat_graph_runs_after_a_flag(wrong: bool) -> None:
    def compiled(given: Any) -> list[Tensor]:
        return [torch.zeros(2), torch.tensor(wrong)]

    whole = flat("aten.gather.default")
    task = task_of(whole.program, lambda *given: ["flat graph"])
    run = Checked(task, whole.shape, [Variant(compiled)], flagged=True)
    (found,) = run(*call("aten.gather.default", 0, 3))
    assert found == "flat graph" if wrong else torch.equal(found, torch.zeros(2))
