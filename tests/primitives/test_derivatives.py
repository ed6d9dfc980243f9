"""Tests that gradients of every strategy with a derivative equal those of the op run once for each member, in
float64.

The strategy and the members read the same leaves. A Stacked argument is one leaf `[N, ...]`, and member i
reads `[i]`. All members read a Shared argument, so its gradient is the sum of their gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from option_spaces import OPTIONS, Pick, arguments
from oracle import WALKED, factors_of, member, outputs, packed, put, tensors
from torch import Tensor, nn

import widepack
from primitives.test_options import kinds, plain
from widepack.ir import ops
from widepack.ir.values import Shared, Stacked, Value
from widepack.lowering.interpreter import applicable
from widepack.registry.registry import REGISTRY, Strategy
from widepack.registry.samples import SAMPLES, Draw, Sample
from widepack.registry.writer import EagerWriter

RTOL = 1e-9
NO_DIMS = {
    f"aten.{n}"
    for n in (
        "std.dim",
        "var.dim",
        "std.correction",
        "var.correction",
        "std_mean.correction",
        "var_mean.correction",
    )
}
"""The dims [] mean all dims, but then the derivative of torch divides by one number instead of all."""
pytestmark = pytest.mark.filterwarnings("error")
Memory = Callable[[Tensor], Tensor]


def leaf(x: Tensor) -> Tensor:
    return x.double().detach().clone().requires_grad_() if x.is_floating_point() else x


def arranged(
    many: list[Sample], which: tuple[bool, ...], memory: Memory
) -> tuple[list[Tensor], Sample, list[Sample]]:
    """Returns the leaves, arguments for a strategy over them, and the arguments of each member."""
    stacked = [k for k, a in zip(which, arguments(many[0])) for _ in tensors(a)]
    leaves, columns, by_argument = [], [], []
    for s, parts in zip(stacked, zip(*(tensors(m) for m in many))):
        x = leaf(torch.stack(parts) if s else parts[0])
        leaves.append(x)
        columns.append(Stacked(Value(None, memory(x)), factors_of(x)) if s else Shared(Value(None, x)))
        by_argument.append(list(x.unbind(0)) if s else [x] * len(many))
    args, kwargs = put(many[0], iter(columns))
    return leaves, (args, kwargs), [put(many[0], iter([o[i] for o in by_argument])) for i in range(len(many))]


def flat(value: Any) -> list[Any]:
    return [p for m in value for p in flat(m)] if isinstance(value, (list, tuple)) else [value]


def gradients(rows: list[list[Any]], leaves: list[Tensor]) -> list[Tensor]:
    """Returns gradients of a weighted sum of all outputs; zero for a leaf without gradient.

    rows: [member][output].
    """
    total = torch.zeros((), dtype=torch.float64)
    for i, row in enumerate(rows):
        for k, value in enumerate(row):
            if isinstance(value, Tensor) and value.requires_grad:
                value = torch.view_as_real(value) if value.is_complex() else value
                weights = torch.randn(
                    value.shape, generator=torch.Generator().manual_seed(100 * i + k), dtype=torch.float64
                )
                total = total + (value.to(torch.float64) * weights).sum()
    inputs = [x for x in leaves if x.requires_grad]
    found = (
        torch.autograd.grad(total, inputs, allow_unused=True) if total.requires_grad else [None] * len(inputs)
    )
    return [torch.zeros_like(x) if d is None else d for x, d in zip(inputs, found)]


def alone(op: str, calls: list[Sample]) -> list[list[Any]] | None:
    """Returns each member's outputs; None if the op has no derivative or refuses the arguments."""
    try:
        rows = [flat(member(op, s)) for s in calls]
    except (RuntimeError, IndexError, NotImplementedError, ValueError):
        return None
    return rows if any(isinstance(v, Tensor) and v.requires_grad for v in rows[0]) else None


def compare(op: str, many: list[Sample], which: tuple[bool, ...], memory: Memory) -> int:
    """Compares strategies with the members, and returns the number of compared strategies."""
    leaves, (args, kwargs), calls = arranged(many, which, memory)
    rows = alone(op, calls)
    if rows is None:
        return 0
    w = EagerWriter(len(many))
    w.op = op
    count = 0
    for s in applicable(w, op, args, kwargs):
        if not s.derivative or s.on_request:
            continue
        where = f"{op}, Stacked: {which}, {memory.__name__}, strategy {s.name}"
        got = [flat(o) for o in outputs(s.rule(w, *args, **kwargs), len(many))]
        seen = [
            [None if g is None else v for g, v in zip(parts, row, strict=True)]
            for parts, row in zip(got, rows)
        ]  # no node reads a result that the strategy omits
        try:
            want = gradients(seen, leaves)
        except (RuntimeError, NotImplementedError):  # torch has no derivative of the op
            return count
        rows = [flat(member(op, m)) for m in calls]  # a graph can be used for one backward only
        for number, (a, b) in enumerate(zip(gradients(got, leaves), want)):
            scale = float(b.abs().nan_to_num().max()) if b.numel() else 0.0
            message = partial("{}, leaf {}: {}".format, where, number)
            torch.testing.assert_close(
                a, b, rtol=0, atol=RTOL * max(scale, 1e-3), equal_nan=True, msg=message
            )
        count += 1
    return count


def drawn(op: str, members: int, batch: int, seed: int) -> list[Sample]:
    g = torch.Generator().manual_seed(seed)
    pick = Pick(lambda count: int(torch.randint(0, count, (), generator=g)))
    OPTIONS[op](Draw(0), pick, batch)
    return [OPTIONS[op](Draw(10 + i), pick.again(), batch) for i in range(members)]


def memories(x: Tensor) -> Tensor:
    return packed(x) if x.ndim >= 3 else x


LAYERS = sorted(op for op in OPTIONS if any(s.derivative for s in REGISTRY[op].strategies.values()))


def strategies_of(op: str) -> list[Strategy]:
    return list(REGISTRY[op].strategies.values())


def test_every_layer_has_a_strategy_with_a_derivative() -> None:
    """Otherwise the op runs once for each member."""
    assert all(any(s.derivative for s in strategies_of(op)) for op in OPTIONS)


@pytest.mark.parametrize("op", LAYERS)
def test_gradients_of_strategies_equal_those_of_the_members(op: str) -> None:
    count = 0
    for seed in range(3):
        many = drawn(op, 2, 2, seed)
        for which in kinds(len(arguments(many[0])))[: 3 + seed]:
            count += compare(op, many, which, memories if seed % 2 else plain)
    assert count or "pool" not in op


@pytest.mark.slow
@pytest.mark.parametrize("op", LAYERS)
def test_gradients_over_many_options_equal_those_of_the_members(op: str) -> None:
    for seed in range(10, 35):
        many = drawn(op, 1 + seed % 3, (0, 1, 4)[seed % 3], seed)
        for which in kinds(len(arguments(many[0]))):
            for memory in (plain, memories):
                compare(op, many, which, memory)


def of_samples(op: str) -> Iterator[list[Sample]]:
    for many in zip(*(SAMPLES[op](Draw(17 + i)) for i in range(2))):
        complex_ = any(t.is_complex() for t in tensors(many[0]))
        every = op in NO_DIMS and len(many[0][0]) > 1 and many[0][0][1] == []
        if ops.pure(op, *many[0]) and not complex_ and not every:
            yield list(many)


@pytest.mark.slow
@pytest.mark.parametrize("op", [op for op in WALKED if any(True for _ in of_samples(op))])
def test_gradients_of_every_op_equal_those_of_the_members(op: str) -> None:
    """The test covers the registry with its samples."""
    for many in of_samples(op):
        for which in kinds(len(arguments(many[0])))[:4]:
            for memory in (plain, memories):
                compare(op, many, which, memory)


@pytest.mark.parametrize("each", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_padding_row_has_no_gradient_in_a_fused_module(each: bool) -> None:
    members: list[nn.Module] = [nn.Embedding(5, 4, padding_idx=-2).double() for _ in range(3)]
    for m in members:
        nn.init.normal_(m.weight)  # type: ignore[arg-type]
    ids = torch.randint(0, 5, (3, 40))
    fused = widepack.fuse(copy.deepcopy(members), ids[0])
    (fused.each(ids) if each else fused(ids[0])).square().sum().backward()
    for i, m in enumerate(members):
        m(ids[i if each else 0]).square().sum().backward()
    want = torch.stack([m.weight.grad for m in members])  # type: ignore[misc]
    torch.testing.assert_close(dict(fused.named_parameters())["weight"].grad, want)
    assert not want[:, 3].any()


@pytest.mark.parametrize("strategy", ["independent", "shared"])
@pytest.mark.parametrize(
    "op", ["dropout", "native_dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"]
)
def test_dropped_numbers_have_no_gradient(op: str, strategy: str) -> None:
    """The gradient is the mask: the growth of y for a growth of x."""
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64, requires_grad=True)
    w = EagerWriter(2)
    w.op = f"aten.{op}.default"
    rule = REGISTRY[w.op].strategies[strategy].rule

    def run(value: Tensor) -> Tensor:
        torch.manual_seed(3)
        answer = rule(w, Stacked(Value(None, value)), 0.4, True)
        return (answer[0] if isinstance(answer, tuple) else answer).value.fake  # type: ignore[no-any-return]

    (found,) = torch.autograd.grad(run(x).sum(), x)
    torch.testing.assert_close(found, run(x.detach() + 1) - run(x.detach()))
    assert bool((found == 0).any()) and bool((found > 0).any())
