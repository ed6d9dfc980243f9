"""Tests that every wide layer equals its modules in answers, gradients and statistics, with every strategy.

The expected values come from each module alone in float64, on its input. Members differ in all their numbers.
"""

from __future__ import annotations

import copy

import pytest
import torch
from layer_cases import CASES
from support import fresh, leaves, must
from torch import nn
from wide_layers import (
    DROPOUTS,
    FIRST,
    N,
    assert_members,
    calls,
    check,
    for_all,
    members,
    wide_call,
    wide_layer_of,
)

import widepack
from widepack import UsageError, primitives
from widepack.ir.ops import full_name
from widepack.ir.torch_internals import without_fast_path
from widepack.layers.base import WideLayer
from widepack.layers.catalog import LAYERS
from widepack.registry.registry import REGISTRY


@pytest.mark.extended(keep=100)
@pytest.mark.parametrize("name", CASES)
def test_a_wide_layer_equals_its_modules(name: str) -> None:
    for train in (True, False) if "Norm" in name else (True,):
        check(CASES[name], train)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_strategy_of_a_wide_layer_equals_its_modules(name: str) -> None:
    case = CASES[name]
    ran = []
    for train in (True, False):
        for strategy in wide_layer_of(members(case.make)).strategies:
            try:
                check(case, train, strategy)
                ran.append(strategy)
            except UsageError as e:
                reasons = "those that do", "gives no weights", "does not train on one image"
                assert any(reason in str(e) for reason in reasons)
    assert {"auto", "sequential"} <= set(ran)


@pytest.mark.parametrize(
    "name",
    [
        "Linear",
        "Conv2d-groups",
        "Embedding",
        "GroupNorm",
        "LSTM-all",
        "GRU",
        "MultiheadAttention-self-no-weights",
    ],
)
def test_a_named_strategy_runs(name: str) -> None:
    """The test computes no gradients, because some strategies have none. Some do not run in float64."""
    case = CASES[name]
    alone = [m.eval() for m in members(case.make)]
    args, kwargs = wide_call(calls(case))
    with torch.no_grad(), without_fast_path():
        expected = [m(*a, **k) for m, (a, k) in zip(alone, calls(case))]
        wide_layer, ran = wide_layer_of(alone), []
        for strategy in wide_layer.strategies:
            wide_layer.strategy = strategy
            try:
                assert_members(wide_layer(*args, **kwargs), expected)
                ran.append(strategy)
            except UsageError as e:
                assert "those that do: " in str(e) and "sequential, auto" in str(e)
    assert len(ran) > 2


def test_every_wide_layer_has_a_case() -> None:
    """The cases and the dropout layers cover all wide layers."""
    covered = {f"Wide{name.partition('-')[0]}" for name in CASES} | {
        f"Wide{type(m).__name__}" for m in DROPOUTS
    }
    assert covered == set(LAYERS)
    assert len(LAYERS) == 45
    for name in LAYERS:
        assert issubclass(getattr(primitives, name), WideLayer)
        assert name in dir(primitives)
    with pytest.raises(AttributeError, match="WideNothing"):
        _ = primitives.WideNothing
    assert widepack.primitives is primitives


@pytest.mark.extended(keep=13)
@pytest.mark.parametrize(
    "name", [n if n in FIRST.values() else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_an_input_for_all_members_gives_each_members_answer(name: str) -> None:
    case = CASES[name]
    (args, kwargs), *_ = calls(case)
    wide = [for_all(a) for a in args]
    for j, a in enumerate(args):
        wide[j] = next((wide[i] for i in range(j) if args[i] is a), wide[j])
    for train in (True, False):
        alone = [m.train(train) for m in members(case.make)]
        wide_layer = wide_layer_of([copy.deepcopy(m) for m in alone])
        with without_fast_path():
            expected = [m(*args, **kwargs) for m in alone]
        assert_members(wide_layer(*wide, **{k: for_all(v) for k, v in kwargs.items()}), expected)
        for key, b in wide_layer.named_buffers():
            assert_members(b, [m.get_buffer(key) for m in alone])


@pytest.mark.extended(keep=13)
@pytest.mark.parametrize(
    "name", [n if n in FIRST.values() else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_nan_in_one_members_weights_reaches_no_other_member(name: str) -> None:
    """NaN in all weights of member 1 changes no bit of the other members' answers and statistics."""
    args, kwargs = wide_call(calls(CASES[name]))
    well = wide_layer_of(members(CASES[name].make))
    sick = copy.deepcopy(well)
    with torch.no_grad():
        for t in (*sick.parameters(), *sick.buffers()):
            if t.is_floating_point():
                t[1] = float("nan")
    for strategy in well.strategies:
        one, other = copy.deepcopy(well), copy.deepcopy(sick)
        one.strategy = other.strategy = strategy
        try:
            answer = leaves(one(*args, **kwargs))
        except UsageError:
            continue
        for a, b in zip(
            (*answer, *one.buffers()), (*leaves(other(*args, **kwargs)), *other.buffers()), strict=True
        ):
            assert torch.equal(a[0], b[0]) and torch.equal(a[2], b[2]), strategy


def test_float32_in_inference_equals_the_modules() -> None:
    """In float32 without gradients, the strategies over ops of widepack run."""
    limits = {
        "LSTM-all": {"packed", "fused"},
        "GRU": {"fused"},
        "Conv2d": {"packed"},
        "Linear": {"packed", "streamed"},
    }
    for name, least in limits.items():
        alone = [m.float().eval() for m in members(CASES[name].make)]
        args = [a.float() for a in wide_call(calls(CASES[name]))[0]]
        with torch.no_grad():
            wide_layer, ran = wide_layer_of(alone), set()
            expected = [m(*(a[i] for a in args)) for i, m in enumerate(alone)]
            for strategy in wide_layer.strategies:
                wide_layer.strategy = strategy
                try:
                    assert_members(wide_layer(*args), expected, 1e-5)
                    ran.add(strategy)
                except UsageError as e:
                    assert "those that do: " in str(e)
        assert least | {"sequential", "auto"} <= ran


@pytest.mark.parametrize(
    "name",
    [
        "Linear",
        "Conv2d",
        "LayerNorm",
        "GroupNorm",
        "BatchNorm2d",
        "LSTM",
        "LSTMCell",
        "PReLU",
        "MultiheadAttention-self",
    ],
)
def test_autocast_equals_autocast_of_the_modules(name: str) -> None:
    """Autocast chooses the same dtype, also for an input that an earlier layer has cast."""
    case = CASES[name]
    alone = [m.float() for m in members(case.make)]
    wide_layer = wide_layer_of([copy.deepcopy(m) for m in alone])
    for dtype in (torch.float32, torch.bfloat16):
        calls = [tuple(a.to(dtype) for a in case.draw(torch.Generator().manual_seed(i))) for i in range(N)]
        calls = [(args[0],) * 3 if "Attention" in name else args for args in calls]
        for grad in (True, False):
            with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(grad), without_fast_path():
                try:
                    expected = [m(*args) for m, args in zip(alone, calls)]
                except (
                    RuntimeError
                ) as error:  # oneDNN has no bfloat16 recurrent layers on CPUs without AVX-512
                    pytest.skip(f"torch cannot run {name} under autocast on this CPU: {error}")
                inputs = [torch.stack(column) for column in zip(*calls)]
                answer = wide_layer(*(inputs[:1] * 3 if "Attention" in name else inputs))
            assert_members(answer, expected, 0.02)


@pytest.mark.parametrize("name", ["LayerNorm", "GroupNorm"])
def test_parameters_may_be_wider_than_the_input(name: str) -> None:
    alone = [m.float() for m in members(CASES[name].make)]
    (inputs,) = [a.bfloat16() for a in wide_call(calls(CASES[name]))[0]]
    assert_members(wide_layer_of(alone)(inputs), [m(g) for m, g in zip(alone, inputs)], 0.02)


def test_one_member_and_an_empty_batch() -> None:
    (alone,) = members(lambda: nn.Linear(4, 5), 1)
    wide_layer = wide_layer_of([alone])
    assert_members(wide_layer(torch.ones(1, 2, 4).double()), [alone(torch.ones(2, 4).double())])
    assert wide_layer(torch.ones(1, 0, 4).double()).shape == (1, 0, 5)


def test_names_of_strategies_are_registered() -> None:
    for name in LAYERS:
        wide_layer = getattr(primitives, name)
        assert any(full_name(op) in REGISTRY for op in wide_layer.ops) or wide_layer.draws, name


def test_the_strategies_do_not_import_the_wide_layers() -> None:
    code = (
        "import sys, widepack.primitives; "
        "assert not [m for m in sys.modules if m.startswith('widepack.layers')]; "
        "import widepack; widepack.primitives.WideLinear; "
        "assert 'widepack.layers.base' in sys.modules"
    )
    must(fresh(code))
