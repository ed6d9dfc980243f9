"""Compares the optimizers of N members with torch's optimizers of single members."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import widepack
from optim.stepping import DECAY, LR, N, label, numbers, options_of, parameters, per_member, saved, steps

STEPS = 12  # RAdam's first steps have no second moment, Rprop's signs change, ASGD starts to average
BETAS = ([0.9, 0.5, 0.1], [0.999, 0.7, 0.99])
EPS = [1e-8, 1e-3, 0.1]
SIMPLE: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "maximize": True}),
    ("SGD", {"momentum": 0.8, "dampening": 0.3}),
    ("Adam", {}),
    ("Adam", {"amsgrad": True, "eps": 1e-3}),
    ("Adam", {"betas": (0.5, 0.9), "maximize": True}),
    ("AdamW", {}),
    ("AdamW", {"amsgrad": True, "betas": (0.0, 0.7)}),
]
RATES: list[dict[str, Any]] = [
    {"lr": LR},
    {"lr": LR, "weight_decay": DECAY},
    {"lr": 0.05, "weight_decay": DECAY},
]
EACH: list[tuple[str, dict[str, Any]]] = [
    *((name, {**options, **rates}) for name, options in SIMPLE for rates in RATES),
    ("Adam", {"lr": 0.1, "betas": ([0.9, 0.5, 0.0], 0.999)}),
    ("Adam", {"lr": LR, "betas": (0.9, [0.999, 0.9, 0.5]), "amsgrad": True}),
    ("Adam", {"lr": LR, "eps": EPS, "betas": BETAS}),
    ("AdamW", {"lr": LR, "weight_decay": [0.1, 0.0, 0.2], "betas": ([0.9, 0.8, 0.7], 0.99)}),
    ("SGD", {"lr": 0.1, "momentum": [0.9, 0.0, 0.5], "dampening": 0.3}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": [0.1, 0.0, 0.5]}),
    ("SGD", {"lr": LR, "momentum": [0.9, 0.0, 0.5], "dampening": [0.1, 0.2, 0.5]}),
    ("SGD", {"lr": LR, "momentum": [0.9, 0.1, 0.5], "nesterov": True, "weight_decay": 0.1}),
    ("Adadelta", {"lr": LR, "rho": [0.9, 0.5, 0.95], "weight_decay": DECAY}),
    ("Adadelta", {"eps": [1e-6, 1e-3, 0.1], "maximize": True}),
    ("RMSprop", {"lr": LR, "alpha": [0.9, 0.5, 0.99], "momentum": [0.9, 0.0, 0.5]}),
    ("RMSprop", {"eps": EPS, "centered": True, "alpha": [0.9, 0.5, 0.99]}),
    ("RMSprop", {"lr": LR, "weight_decay": DECAY, "centered": True}),
    ("Adagrad", {"lr": LR, "lr_decay": [0.1, 0.0, 0.5], "weight_decay": DECAY}),
    ("Adagrad", {"initial_accumulator_value": [0.0, 0.5, 2.0], "eps": [1e-10, 1e-3, 0.1]}),
    ("Adamax", {"lr": LR, "betas": BETAS}),
    ("Adamax", {"lr": 0.1, "eps": EPS, "weight_decay": DECAY}),
    *((name, {"lr": LR, "weight_decay": DECAY}) for name in ("NAdam", "RAdam")),
    *(
        (name, {"lr": 0.05, "weight_decay": DECAY, "decoupled_weight_decay": True})
        for name in ("NAdam", "RAdam")
    ),
    *((name, {"lr": LR, "betas": BETAS, "eps": EPS, "maximize": True}) for name in ("NAdam", "RAdam")),
    ("NAdam", {"lr": 0.1, "momentum_decay": [4e-3, 0.0, 0.5]}),
    ("NAdam", {"lr": 0.1, "betas": (0.9, BETAS[1])}),
    ("RAdam", {"lr": 0.1, "betas": (0.9, [0.999, 0.5, 0.0])}),
    ("Rprop", {"lr": LR}),
    ("Rprop", {"lr": LR, "etas": ([0.5, 0.3, 0.9], [1.2, 2.0, 1.1]), "maximize": True}),
    ("Rprop", {"etas": (0.5, [1.2, 2.0, 4.0]), "step_sizes": ([1e-6, 5e-3, 0.01], [50.0, 0.02, 0.05])}),
    ("ASGD", {"lr": LR, "weight_decay": DECAY, "t0": [1e6, 3.0, 0.0]}),
    ("ASGD", {"lr": LR, "lambd": [1e-4, 0.3, 0.0], "alpha": [0.75, 0.5, 1.0], "maximize": True}),
    ("ASGD", {"lr": 0.1, "lambd": [0.5, 0.0, 0.1], "t0": 4.0}),
]
ONE: list[tuple[str, dict[str, Any]]] = [
    *((name, {"lr": 0.1, "weight_decay": 0.1, **options}) for name, options in SIMPLE),
    ("Adadelta", {"weight_decay": 0.1}),
    *((name, {"lr": 0.1, "weight_decay": 0.1}) for name in ("NAdam", "RAdam", "ASGD")),
    *(
        (name, {"lr": 0.1, "weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True})
        for name in ("NAdam", "RAdam")
    ),
    ("NAdam", {"betas": (0.5, 0.9), "momentum_decay": 0.5, "eps": 1e-3}),
    ("RAdam", {"betas": (0.5, 0.9), "eps": 1e-3}),
    ("Rprop", {"lr": 0.1}),
    ("Rprop", {"etas": (0.3, 2.5), "step_sizes": (1e-3, 0.05), "maximize": True}),
    ("ASGD", {"lr": 0.1, "lambd": 0.3, "alpha": 0.5, "t0": 3.0, "maximize": True}),
]
"""Options of one number, with which an optimizer equals torch's bit for bit."""
NAMES = list(dict.fromkeys(name for name, _ in ONE))
BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.complex128: 1e-12, torch.bfloat16: 0.05}
REAL = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)


def alone(name: str, options: dict[str, Any], dtype: torch.dtype, i: int) -> list[Tensor]:
    """Returns member i's parameters after steps of torch's optimizer."""
    params = parameters(dtype, i)
    steps(getattr(torch.optim, name)(params, foreach=False, **options_of(options, i)), params, STEPS, i=i)
    return params


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("name", "options"), EACH, ids=label)
def test_each_member_moves_by_its_own_options(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    together, bound = parameters(dtype), BOUNDS[dtype]
    steps(getattr(widepack.optim, name)(together, **options), together, STEPS)
    for i in range(N):
        for p, a, start in zip(together, alone(name, options, dtype, i), numbers(0, dtype)):
            assert p.dtype == dtype
            torch.testing.assert_close(p[i], a, rtol=bound, atol=bound)
            assert dtype == torch.bfloat16 or not torch.allclose(p[i], start[i], rtol=1e-6)


@pytest.mark.parametrize("foreach", [False, True])
@REAL
@pytest.mark.parametrize(("name", "options"), ONE, ids=label)
def test_one_number_for_all_members_equals_torch(
    name: str, options: dict[str, Any], dtype: torch.dtype, foreach: bool
) -> None:
    """Bit for bit as torch's loop over parameters (`foreach=False`).

    torch's kernels of many parameters round otherwise than its loop. For ASGD the rate differs by the
    rounding of float32.
    """
    ours, torchs = parameters(dtype), parameters(dtype)
    steps(getattr(widepack.optim, name)(ours, **options), ours, STEPS)
    steps(getattr(torch.optim, name)(torchs, foreach=foreach, **options), torchs, STEPS)
    for a, b in zip(ours, torchs):
        if foreach:
            bound = max(BOUNDS[dtype], 1e-7 if name == "ASGD" else 0.0)
            torch.testing.assert_close(a, b, rtol=bound, atol=bound)
        else:
            assert torch.equal(a, b)


@REAL
@pytest.mark.parametrize("name", NAMES)
def test_state_dicts_are_exchanged_with_torchs_optimizers(name: str, dtype: torch.dtype) -> None:
    ours, torchs = parameters(dtype), parameters(dtype)
    options: dict[str, Any] = {"momentum": 0.9} if name == "SGD" else {}
    one = getattr(widepack.optim, name)(ours, lr=0.3, **options)
    other = getattr(torch.optim, name)(torchs, lr=0.1, foreach=False, **options)
    steps(other, torchs, 6)
    for a, b in zip(ours, torchs):
        a.data.copy_(b)
    one.load_state_dict(copy.deepcopy(other.state_dict()))  # torch does not copy the state that it loads
    steps(one, ours, 6, 6)
    steps(other, torchs, 6, 6)
    assert all(torch.equal(a, b) for a, b in zip(ours, torchs))
    back = getattr(torch.optim, name)(torchs, lr=0.2, **options)
    back.load_state_dict(one.state_dict())
    assert back.param_groups[0]["lr"] == 0.1
    assert set(back.state[torchs[0]]) == set(other.state[torchs[0]])
    for key, value in other.state[torchs[1]].items():
        assert torch.equal(value, one.state[ours[1]][key]), key


@REAL
@pytest.mark.parametrize("k", range(len(EACH)), ids=[label(n) + "-" + label(o) for n, o in EACH])
def test_a_run_continues_from_a_file_bit_for_bit(k: int, dtype: torch.dtype) -> None:
    """A new optimizer gets the options from a file that torch reads without running code."""
    name, options = EACH[k]
    uninterrupted, params = parameters(dtype), parameters(dtype)
    steps(getattr(widepack.optim, name)(uninterrupted, **options), uninterrupted, STEPS)
    first = getattr(widepack.optim, name)(params, **options)
    steps(first, params, 5)
    state = torch.load(saved(first.state_dict()), weights_only=True)
    assert {n: state["param_groups"][0][n] for n in options} == options  # a list for each member's numbers
    second = getattr(widepack.optim, name)(params)
    second.load_state_dict(state)
    for other in (second, copy.deepcopy(second), pickle.loads(pickle.dumps(second))):
        assert {n: other.param_groups[0][n] for n in options} == {
            n: per_member(v) for n, v in options.items()
        }
    steps(second, params, STEPS - 5, 5)
    assert all(torch.equal(a, b) for a, b in zip(params, uninterrupted))


@pytest.mark.parametrize("name", NAMES)
def test_a_torch_state_of_one_number_continues_with_a_number_for_each_member(name: str) -> None:
    changed: dict[str, dict[str, Any]] = {"NAdam": {"betas": BETAS}, "ASGD": {"t0": [2.0, 8.0, 20.0]}}
    options = {"lr": LR, **changed.get(name, {})}
    torchs, ours = parameters(), parameters()
    other = getattr(torch.optim, name)(torchs)
    steps(other, torchs, 4)
    for a, b in zip(ours, torchs):
        a.data.copy_(b)
    one = getattr(widepack.optim, name)(ours)
    one.load_state_dict(copy.deepcopy(other.state_dict()))
    one.param_groups[0].update({k: per_member(v) for k, v in options.items()})
    steps(one, ours, 4, 4)
    for i in range(N):
        own = parameters(i=i)
        reference = getattr(torch.optim, name)(own, foreach=False)
        steps(reference, own, 4, i=i)
        reference.param_groups[0].update(options_of(options, i))
        steps(reference, own, 4, 4, i=i)
        for p, a in zip(ours, own):
            torch.testing.assert_close(p[i], a, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", dict.fromkeys(name for name, _ in EACH))
def test_options_have_torchs_names_and_defaults(name: str) -> None:
    """Those with a number may have N; those with a pair, N for each part; a switch is for all members."""
    optimizer = getattr(widepack.optim, name)
    ours, torchs = (getattr(o, name)(parameters()).param_groups[0] for o in (widepack.optim, torch.optim))
    assert [k for k, value in ours.items() if k != "params" and value != torchs[k]] == []
    kinds = {k: type(v) for k, v in ours.items() if k != "params"}
    assert {"initial_lr", *(k for k, kind in kinds.items() if kind is float)} == {*optimizer.member_options}
    assert {k for k, kind in kinds.items() if kind is tuple} == {*optimizer.pair_options}
    assert {k for k, kind in kinds.items() if kind is bool} <= {*optimizer.switches}
