"""Tests dropout and random draws: each member draws from its distribution; `shared` draws once for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from widepack import primitives as primitives  # fills the registry
from widepack.ir import ops
from widepack.ir.ops import full_name
from widepack.ir.values import Shared, Stacked, Value
from widepack.lowering.interpreter import applicable
from widepack.registry.registry import REGISTRY
from widepack.registry.writer import EagerWriter

N, MANY = 3, 4000
P = 0.3


def run(op: str, strategy: str, *args: Any, **kwargs: Any) -> Any:
    """Returns the answer of a strategy. Tensors of N + 1 dims are Stacked if they are marked as Stacked."""
    w = EagerWriter(N)
    w.op = full_name(op)
    (found,) = [s for s in applicable(w, w.op, args, kwargs) if s.name == strategy]
    torch.manual_seed(3)
    result = found.rule(w, *args, **kwargs)
    return tuple(m.value.fake for m in result) if isinstance(result, tuple) else result.value.fake


def stacked(x: Tensor) -> Stacked:
    return Stacked(Value(None, x))


def shared(x: Tensor) -> Shared:
    return Shared(Value(None, x))


def packed(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


DROPS = ["dropout", "native_dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"]


@pytest.mark.parametrize("memory", [torch.clone, packed])
@pytest.mark.parametrize("strategy", ["independent", "shared"])
@pytest.mark.parametrize("op", DROPS)
def test_dropout_masks_differ_by_member_or_are_shared(
    op: str, strategy: str, memory: Callable[[Tensor], Tensor]
) -> None:
    x = 1 + torch.rand(N, 40, 100, 3, 2, dtype=torch.float64)
    y = run(op, strategy, stacked(memory(x)), P, True)
    y, mask = y if isinstance(y, tuple) else (y, None)
    torch.manual_seed(5)
    want = ops.resolve(full_name(op))(x[0], P, True)
    want = want[0] if isinstance(want, tuple) else want
    gone = want[(want - want.min()).abs() < 1e-9][0]  # 0, or the value with which alpha dropout replaces it
    dropped = (y - gone).abs() < 1e-9
    # kept numbers are a linear function of x, the same function as for one member
    slope, expected_slope = (
        (t[~d] - gone) for t, d in ((y[0], dropped[0]), (want, (want - gone).abs() < 1e-9))
    )
    a, b = (
        (s / v[~d])
        for s, v, d in ((slope, x[0], dropped[0]), (expected_slope, x[0], (want - gone).abs() < 1e-9))
    )
    if "alpha" not in op:
        torch.testing.assert_close(a, torch.full_like(a, 1 / (1 - P)))
        torch.testing.assert_close(b, torch.full_like(b, 1 / (1 - P)))
    else:
        torch.testing.assert_close(
            y[0][~dropped[0]].mean(), want[(want - gone).abs() >= 1e-9].mean(), rtol=0.02, atol=0
        )
    if "feature" in op:  # a channel is dropped completely
        assert bool((dropped.flatten(3).all(3) | ~dropped.flatten(3).any(3)).all())
        dropped = dropped[..., 0, 0]
    for i in range(N):
        assert float(dropped[i].double().mean()) == pytest.approx(P, abs=0.04)
    both = float((dropped[0] & dropped[1]).double().mean())
    assert (
        both == pytest.approx(float(dropped[0].double().mean()), abs=1e-9)
        if strategy == "shared"
        else both == pytest.approx(P * P, abs=0.03)
    )
    assert mask is None or torch.equal(mask, ~dropped)


@pytest.mark.parametrize("op", DROPS)
def test_each_member_drops_other_numbers_of_a_shared_input(op: str) -> None:
    y = run(op, "independent", shared(torch.ones(40, 100, 2)), P, True)
    y = y[0] if isinstance(y, tuple) else y
    assert y.shape == (N, 40, 100, 2) and not torch.equal(y[0], y[1]) and not torch.equal(y[1], y[2])


DRAWS: list[tuple[str, list[Any], Callable[[Tensor], Tensor], float]] = [
    ("bernoulli.p", [P], lambda y: y, P),
    ("rand_like", [], lambda y: y, 0.5),
    ("randn_like", [], torch.abs, 0.798),
    ("randint_like", [5], lambda y: y, 2.0),
    ("randint_like.low_dtype", [2, 5], lambda y: y, 3.0),
    ("uniform", [1.0, 2.0], lambda y: y, 1.5),
    ("exponential", [2.0], lambda y: y, 0.5),
    ("cauchy", [0.0, 1.0], lambda y: (y.abs() < 1).double(), 0.5),
    ("geometric", [0.5], lambda y: y, 2.0),
    ("log_normal", [0.0, 0.5], torch.log, 0.0),
]
OF_SIZES = [("rand", [], 0.5), ("randn", [], 0.0), ("randint", [5], 2.0), ("randint.low", [2, 5], 3.0)]


@pytest.mark.parametrize("kind", [stacked, shared])
@pytest.mark.parametrize("strategy", ["independent", "shared"])
@pytest.mark.parametrize(("op", "rest", "seen", "mean"), DRAWS, ids=[d[0] for d in DRAWS])
def test_draws_have_the_distribution_of_the_op(
    op: str,
    rest: list[Any],
    seen: Callable[[Tensor], Tensor],
    mean: float,
    strategy: str,
    kind: Callable[[Tensor], Any],
) -> None:
    x = torch.zeros(*([N] if kind is stacked else []), MANY, dtype=torch.float64)
    y = run(op, strategy, kind(x), *rest)
    assert y.shape == (N, MANY) and y.dtype == torch.float64
    check_draws(seen(y), mean, strategy)


@pytest.mark.parametrize("strategy", ["independent", "shared"])
@pytest.mark.parametrize(("op", "args", "mean"), OF_SIZES)
def test_random_numbers_from_sizes_differ_by_member(
    op: str, args: list[int], mean: float, strategy: str
) -> None:
    y = run(op, strategy, *args, [MANY, 2])
    assert y.shape == (N, MANY, 2)
    check_draws(y, mean, strategy)


def check_draws(y: Tensor, mean: float, strategy: str) -> None:
    for one in y:
        assert float(one.double().mean()) == pytest.approx(mean, abs=0.06)
    assert torch.equal(y[0], y[1]) == torch.equal(y[1], y[2]) == (strategy == "shared")


@pytest.mark.parametrize("kind", [stacked, shared])
def test_slopes_differ_by_member(kind: Callable[[Tensor], Any]) -> None:
    x = -torch.ones(*([N] if kind is stacked else []), MANY)
    y = run("rrelu", "independent", kind(x), 0.1, 0.3, True)
    assert y.shape == (N, MANY) and not torch.equal(y[0], y[1])
    assert bool((-y >= 0.1).all() and (-y <= 0.3).all()) and float(-y.mean()) == pytest.approx(0.2, abs=0.01)


@pytest.mark.parametrize("kind", [stacked, shared])
def test_probabilities_and_means_differ_by_member(kind: Callable[[Tensor], Any]) -> None:
    chances = (
        torch.tensor([0.1, 0.5, 0.9])[:, None].expand(N, MANY)
        if kind is stacked
        else torch.full((MANY,), 0.5)
    )
    means = [0.1, 0.5, 0.9] if kind is stacked else [0.5] * 3
    for op, args in (
        ("bernoulli", [kind(chances)]),
        ("poisson", [kind(chances)]),
        ("normal.Tensor_float", [kind(chances), 0.2]),
    ):
        y = run(op, "independent", *args)
        assert y.shape == (N, MANY) and not torch.equal(y[0], y[1])
        for one, mean in zip(y, means):
            assert float(one.mean()) == pytest.approx(mean, abs=0.06)
    rows = torch.eye(3)[:, None].expand(N, 5, 3) if kind is stacked else torch.eye(3)[0].expand(5, 3)
    picked = run("multinomial", "independent", kind(rows), 1)
    assert picked.shape == (N, 5, 1) and [int(p.unique()) for p in picked] == (
        [0, 1, 2] if kind is stacked else [0, 0, 0]
    )


def test_only_random_strategies_give_other_numbers() -> None:
    """Strategies that a race compares must give equal answers. Plans for a GPU name `chain` themselves."""
    on_request = {(op, s.name) for op, p in REGISTRY.items() for s in p.strategies.values() if s.on_request}
    on_request.remove(("aten.linear.default", "chain"))
    assert on_request and all(
        name == "shared" and REGISTRY[op].family in ("dropout", "random") for op, name in on_request
    )
    assert all(next(iter(REGISTRY[op].strategies.values())).on_request is False for op, _ in on_request), (
        "a strategy on request is never the first"
    )
