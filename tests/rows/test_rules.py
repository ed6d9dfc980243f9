"""Tests the rules of rows on the samples of every op: what a rule says is compared with what the op does.

One dim of an op's arguments is the batch. Where the walk says that the rows are in a dim of the result, other
values and NaN in one row may change that row of the result only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from oracle import put, tensors

from widepack.errors import LoweringError
from widepack.ir import ops
from widepack.ir.cast import raise_program
from widepack.ir.encoding import encode
from widepack.ir.fake_values import CPU
from widepack.ir.tensor_type import TensorType
from widepack.registry.samples import SAMPLES, Draw
from widepack.rows.call import MixesRows
from widepack.rows.layout import RowAxis
from widepack.rows.trials import NoTrial, RowTrials
from widepack.rows.walk import walk
from widepack.runtime.graph_module import graph_module
from widepack.spec.draws import InputSource
from widepack.spec.dtypes import dtype_name
from widepack.spec.input_spec import DimExpr
from widepack_artifacts.program import Node, Output, Program, Ref, Slot

SAMPLES_OF_AN_OP = 4
LABELS_OF_A_SAMPLE = 5
RANDOM = {op for op in SAMPLES if torch.Tag.nondeterministic_seeded in getattr(ops.resolve(op), "tags", ())}
CASES = sorted(set(SAMPLES) - RANDOM)
REFUSED = (MixesRows, NoTrial, LoweringError, RuntimeError, ValueError, IndexError, TypeError, AssertionError)


def labels(given: list[torch.Tensor]) -> Iterator[dict[int, int]]:
    """Yields which dim of which tensors is the batch: of one, or of all that have a dim of one size."""
    for k, x in enumerate(given):
        for dim in range(x.dim()):
            together = {
                j: dim - x.dim() + y.dim()
                for j, y in enumerate(given)
                if y.dim() >= x.dim() - dim and y.shape[dim - x.dim()] == x.shape[dim]
            }
            yield {k: dim}
            if len(together) > 1:
                yield together
            if (front := {j: dim for j, y in enumerate(given) if y.dim() > dim}) not in ({k: dim}, together):
                yield front


def type_of(x: torch.Tensor, batch: int | None) -> TensorType:
    sizes = [DimExpr("B") if d == batch else size for d, size in enumerate(x.shape)]
    return TensorType(dtype_name(x.dtype), tuple(sizes))


def program_of(op: str, sample: Any, given: list[torch.Tensor], batch: dict[int, int]) -> Program:
    """Returns a program of one node, with an output for each result."""
    args, kwargs = put(sample, iter([Ref(f"x{k}") for k in range(len(given))]))
    result = ops.resolve(op)(*sample[0], **sample[1])
    nodes = [Node("y", op, tuple(encode(args)), dict(encode(kwargs)))]
    names = ["y"]
    if isinstance(result, (tuple, list)):
        names = [f"y{i}" for i, part in enumerate(result) if isinstance(part, torch.Tensor)]
        nodes += [Node(n, "operator.getitem", (Ref("y"), int(n[1:]))) for n in names]
    elif not isinstance(result, torch.Tensor):
        raise TypeError("a number")
    slots = tuple(
        Slot(f"x{k}", f"x{k}", "shared", str(type_of(x, batch.get(k)))) for k, x in enumerate(given)
    )
    return Program((), slots, tuple(nodes), tuple(Output(Ref(n), "shared") for n in names))


def check(op: str, sample: Any, given: list[torch.Tensor], batch: dict[int, int]) -> bool:
    """Checks one choice of the batch. Returns whether a rule said where the rows are."""
    try:
        program = program_of(op, sample, given, batch)
        layouts, others = walk(program, "B", [{"B": 3}, {"B": 5}])
    except REFUSED:
        return False
    assert layouts == others, op
    run = graph_module(program, CPU).forward
    run64 = graph_module(raise_program(program), CPU).forward
    sources = [
        InputSource(f"x{k}", str(type_of(x, batch.get(k))), None, None, x.detach(), "none")
        for k, x in enumerate(given)
    ]
    axes = [layouts[o.value.name] for o in program.outputs]
    try:
        shapes = run(*given)
    except REFUSED:
        return False
    types = [
        type_of(y, axis.dim if isinstance(axis, RowAxis) and axis.plain else None)
        for y, axis in zip(shapes, axes)
    ]
    if all(t.numbers is not None for t in types):
        return False
    trials = RowTrials(lambda x: run(*x), lambda x: run64(*x), sources, types, "B")
    with torch.no_grad():
        try:
            why = trials.difference({}, 2, 4, [1, 2])
        except REFUSED:
            return False
    assert not why, (
        f"{op}: {why}; batch {batch}, shapes {[list(x.shape) for x in given]}, {sample[1]}, {axes}"
    )
    return True


@pytest.mark.extended(keep=8)
@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, about short signals
@pytest.mark.parametrize("op", CASES)
def test_a_rule_says_where_the_rows_are(op: str) -> None:
    for sample in SAMPLES[op](Draw(0))[:SAMPLES_OF_AN_OP]:
        given = tensors(sample)
        for count, batch in enumerate(labels(given)):
            if count >= LABELS_OF_A_SAMPLE:
                break
            check(op, sample, given, batch)


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_most_ops_have_a_rule() -> None:
    ruled = set()
    for op in CASES:
        sample = SAMPLES[op](Draw(0))[0]
        given = tensors(sample)
        if any(check(op, sample, given, batch) for batch in labels(given)):
            ruled.add(op)
    assert len(ruled) > 0.5 * len(CASES), (len(ruled), len(CASES))
