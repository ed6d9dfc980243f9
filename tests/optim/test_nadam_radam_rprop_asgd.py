"""Compares NAdam, RAdam, Rprop and ASGD of N members with torch's optimizers of single members."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import widepack
from widepack import UsageError
from widepack.optim import ASGD, NAdam, PerMember, PerMemberScheduler, RAdam, Rprop
from widepack.optim.rates import FROZEN

N = 3
LR = [0.1, 0.02, 0.5]
DECAY = [0.0, 0.3, 0.01]
BETAS = ([0.9, 0.5, 0.1], [0.999, 0.7, 0.99])
SHAPES = ((), (4,), (2, 3))
STEPS = 12  # RAdam's first steps have no second moment, Rprop's signs change, ASGD starts to average
NAMES = ["NAdam", "RAdam", "Rprop", "ASGD"]
EACH: list[tuple[str, dict[str, Any]]] = [
    ("NAdam", {"lr": LR, "weight_decay": DECAY}),
    ("NAdam", {"lr": 0.05, "weight_decay": DECAY, "decoupled_weight_decay": True}),
    ("NAdam", {"lr": LR, "betas": BETAS, "eps": [1e-8, 1e-3, 0.1], "maximize": True}),
    ("NAdam", {"lr": 0.1, "momentum_decay": [4e-3, 0.0, 0.5]}),
    ("NAdam", {"lr": 0.1, "betas": (0.9, BETAS[1])}),
    ("RAdam", {"lr": LR, "weight_decay": DECAY}),
    ("RAdam", {"lr": 0.05, "weight_decay": DECAY, "decoupled_weight_decay": True}),
    ("RAdam", {"lr": LR, "betas": BETAS, "eps": [1e-8, 1e-3, 0.1], "maximize": True}),
    ("RAdam", {"lr": 0.1, "betas": (0.9, [0.999, 0.5, 0.0])}),
    ("Rprop", {"lr": LR}),
    ("Rprop", {"lr": LR, "etas": ([0.5, 0.3, 0.9], [1.2, 2.0, 1.1]), "maximize": True}),
    ("Rprop", {"etas": (0.5, [1.2, 2.0, 4.0]), "step_sizes": ([1e-6, 5e-3, 0.01], [50.0, 0.02, 0.05])}),
    ("ASGD", {"lr": LR, "weight_decay": DECAY, "t0": [1e6, 3.0, 0.0]}),
    ("ASGD", {"lr": LR, "lambd": [1e-4, 0.3, 0.0], "alpha": [0.75, 0.5, 1.0], "maximize": True}),
    ("ASGD", {"lr": 0.1, "lambd": [0.5, 0.0, 0.1], "t0": 4.0}),
]
ONE: list[tuple[str, dict[str, Any]]] = [
    ("NAdam", {"lr": 0.1, "weight_decay": 0.1}),
    ("NAdam", {"lr": 0.1, "weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True}),
    ("NAdam", {"betas": (0.5, 0.9), "momentum_decay": 0.5, "eps": 1e-3}),
    ("RAdam", {"lr": 0.1, "weight_decay": 0.1}),
    ("RAdam", {"lr": 0.1, "weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True}),
    ("RAdam", {"betas": (0.5, 0.9), "eps": 1e-3}),
    ("Rprop", {"lr": 0.1}),
    ("Rprop", {"etas": (0.3, 2.5), "step_sizes": (1e-3, 0.05), "maximize": True}),
    ("ASGD", {"lr": 0.1, "weight_decay": 0.1}),
    ("ASGD", {"lr": 0.1, "lambd": 0.3, "alpha": 0.5, "t0": 3.0, "maximize": True}),
]


def label(value: Any) -> str:
    return value if isinstance(value, str) else "-".join(value) or "plain"


def numbers(seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Returns random tensors `[N, *shape]`, one for each shape. Seeds from 1 are gradients with zeros."""
    g = torch.Generator().manual_seed(seed)
    values = [torch.randn((N, *s), generator=g, dtype=dtype) for s in SHAPES]
    if seed:
        values[2][:, 0, 1] = 0.0
    return values


def steps(
    optimizer: torch.optim.Optimizer, params: list[Tensor], i: int | None, count: int, first: int = 0
) -> None:
    """Performs steps with the gradients of all members, or of member i."""
    for k in range(first, first + count):
        for p, g in zip(params, numbers(1 + k, params[0].dtype), strict=True):
            p.grad = g if i is None else g[i].clone()
        optimizer.step()


def of_member(option: Any, i: int) -> Any:
    """Returns member i's value of an option."""
    if isinstance(option, tuple):
        return tuple(of_member(part, i) for part in option)
    return option[i] if isinstance(option, list) else option


def parameters(dtype: torch.dtype = torch.float64, i: int | None = None) -> list[Tensor]:
    return [nn.Parameter(v if i is None else v[i].clone()) for v in numbers(0, dtype)]


def alone(name: str, options: dict[str, Any], dtype: torch.dtype, i: int, count: int = STEPS) -> list[Tensor]:
    """Returns member i's parameters after steps of torch's optimizer."""
    params = parameters(dtype, i)
    own = getattr(torch.optim, name)(
        params, foreach=False, **{k: of_member(v, i) for k, v in options.items()}
    )
    steps(own, params, i, count)
    return params


BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.complex128: 1e-12, torch.bfloat16: 0.05}


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("name", "options"), EACH, ids=label)
def test_each_member_moves_by_its_own_options(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    together, bound = parameters(dtype), BOUNDS[dtype]
    steps(getattr(widepack.optim, name)(together, **options), together, None, STEPS)
    for i in range(N):
        for p, a, start in zip(together, alone(name, options, dtype, i), numbers(0, dtype)):
            assert p.dtype == dtype
            torch.testing.assert_close(p[i], a, rtol=bound, atol=bound)
            assert not torch.allclose(p[i], start[i])


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("name", "options"), ONE, ids=label)
def test_one_number_for_all_members_equals_torch(
    name: str, options: dict[str, Any], dtype: torch.dtype, foreach: bool
) -> None:
    """Bit for bit as torch's loop over parameters (`foreach=False`).

    torch's kernels of many parameters round otherwise than its loop. For ASGD the rate differs by the
    rounding of float32.
    """
    ours, torchs = parameters(dtype), parameters(dtype)
    steps(getattr(widepack.optim, name)(ours, **options), ours, None, STEPS)
    steps(getattr(torch.optim, name)(torchs, foreach=foreach, **options), torchs, None, STEPS)
    for a, b in zip(ours, torchs):
        if foreach:
            bound = max(BOUNDS[dtype], 1e-7 if name == "ASGD" else 0.0)
            torch.testing.assert_close(a, b, rtol=bound, atol=bound)
        else:
            assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_state_dicts_are_exchanged_with_torchs_optimizers(name: str, dtype: torch.dtype) -> None:
    ours, torchs = parameters(dtype), parameters(dtype)
    one = getattr(widepack.optim, name)(ours, lr=0.3)
    other = getattr(torch.optim, name)(torchs, lr=0.1, foreach=False)
    steps(other, torchs, None, 6)
    for a, b in zip(ours, torchs):
        a.data.copy_(b)
    one.load_state_dict(copy.deepcopy(other.state_dict()))
    steps(one, ours, None, 6, 6)
    steps(other, torchs, None, 6, 6)
    assert all(torch.equal(a, b) for a, b in zip(ours, torchs))
    back = getattr(torch.optim, name)(torchs, lr=0.2)
    back.load_state_dict(one.state_dict())
    assert back.param_groups[0]["lr"] == 0.1
    assert set(back.state[torchs[0]]) == set(other.state[torchs[0]])
    for key, value in other.state[torchs[1]].items():
        assert torch.equal(value, one.state[ours[1]][key]), key


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("k", range(len(EACH)), ids=[label(n) + "-" + label(o) for n, o in EACH])
def test_a_run_continues_from_a_file_bit_for_bit(k: int, dtype: torch.dtype) -> None:
    name, options = EACH[k]
    uninterrupted, params = parameters(dtype), parameters(dtype)
    steps(getattr(widepack.optim, name)(uninterrupted, **options), uninterrupted, None, STEPS)
    first = getattr(widepack.optim, name)(params, **options)
    steps(first, params, None, 5)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = getattr(widepack.optim, name)(params)
    second.load_state_dict(torch.load(file, weights_only=True))
    for other in (second, copy.deepcopy(second), pickle.loads(pickle.dumps(second))):
        assert other.param_groups[0]["lr"] == first.param_groups[0]["lr"]
    steps(second, params, None, STEPS - 5, 5)
    assert all(torch.equal(a, b) for a, b in zip(params, uninterrupted))


@pytest.mark.parametrize("name", NAMES)
def test_a_torch_state_of_one_number_continues_with_a_number_for_each_member(name: str) -> None:
    changed: dict[str, dict[str, Any]] = {"NAdam": {"betas": BETAS}, "ASGD": {"t0": [2.0, 8.0, 20.0]}}
    options = changed.get(name, {})
    torchs, ours = parameters(), parameters()
    other = getattr(torch.optim, name)(torchs)
    steps(other, torchs, None, 4)
    for a, b in zip(ours, torchs):
        a.data.copy_(b)
    one = getattr(widepack.optim, name)(ours)
    one.load_state_dict(copy.deepcopy(other.state_dict()))
    one.param_groups[0].update({k: _per_member(v) for k, v in {"lr": LR, **options}.items()})
    steps(one, ours, None, 4, 4)
    for i in range(N):
        own = parameters(i=i)
        reference = getattr(torch.optim, name)(own, foreach=False)
        steps(reference, own, i, 4)
        reference.param_groups[0].update({k: of_member(v, i) for k, v in {"lr": LR, **options}.items()})
        steps(reference, own, i, 4, 4)
        for p, a in zip(ours, own):
            torch.testing.assert_close(p[i], a, rtol=1e-12, atol=1e-12)


def _per_member(option: Any) -> Any:
    if isinstance(option, tuple):
        return tuple(map(_per_member, option))
    return PerMember(option) if isinstance(option, list) else option


@pytest.mark.parametrize("name", NAMES)
def test_a_frozen_member_does_not_change_and_the_others_move_as_before(name: str) -> None:
    options = next(o for n, o in EACH if n == name)
    params, usual = parameters(), parameters()
    optimizer = getattr(widepack.optim, name)(params, **options)
    reference = getattr(widepack.optim, name)(usual, **options)
    steps(optimizer, params, None, 3)
    steps(reference, usual, None, 3)
    before = [p.detach().clone() for p in params]
    states = [copy.deepcopy(optimizer.state[p]) for p in params]
    for p in params:
        setattr(p, FROZEN, (2,))
    steps(optimizer, params, None, 3, 3)
    steps(reference, usual, None, 3, 3)
    for p, u, b, state in zip(params, usual, before, states):
        assert torch.equal(p[2], b[2]) and torch.equal(p[:2], u[:2])
        for key, value in state.items():
            now, other = (v.expand(N) if v.ndim == 0 else v for v in (optimizer.state[p][key], value))
            assert torch.equal(now[2], other[2]), key
            assert torch.equal(now[:2], reference.state[u][key].expand_as(now)[:2]), key


def test_each_member_has_its_own_schedule() -> None:
    params = parameters()
    optimizer = ASGD(params, lr=LR, alpha=[0.75, 0.5, 1.0])
    scheduler = PerMemberScheduler(
        optimizer, lambda o, i: torch.optim.lr_scheduler.StepLR(o, [1, 2, 3][i], 0.5)
    )
    for _ in range(4):
        optimizer.step()
        scheduler.step()
    assert list(optimizer.param_groups[0]["lr"]) == pytest.approx([0.1 / 16, 0.02 / 4, 0.5 / 2])
    pairs = Rprop(params, etas=([0.5, 0.3, 0.9], 1.2))
    PerMemberScheduler(pairs, lambda o, i: torch.optim.lr_scheduler.ConstantLR(o, [1.0, 0.5, 0.1][i]))
    assert pairs.param_groups[0]["etas"] == (PerMember([0.5, 0.3, 0.9]), 1.2)
    assert list(pairs.param_groups[0]["lr"]) == pytest.approx([0.01, 0.005, 0.001])


def test_messages() -> None:
    weight, shared = nn.Parameter(torch.zeros(N, 2)), nn.Parameter(torch.zeros(5))
    for make, words in (
        (lambda: NAdam([weight], betas=(0.9, 1.0)), "NAdam: betas are (0.9, 1.0); each must be at least 0"),
        (
            lambda: NAdam([weight], momentum_decay=[0.1, 0.2]),
            "whose axis 0 has 3. If this is the member axis, give 3",
        ),
        (lambda: RAdam([weight, shared], lr=LR), "parameter 1 of its group is [5]"),
        (lambda: RAdam([weight], eps=-1.0), "RAdam: eps is -1.0"),
        (
            lambda: Rprop([weight], etas=(1.2, 0.5)),
            "Rprop: etas are (1.2, 0.5); the first must be between 0 and 1, the second above 1",
        ),
        (lambda: Rprop([weight], etas=([0.5, 1.0, 0.5], 1.2)), "the first must be between 0 and 1"),
        (lambda: Rprop([weight], etas=0.5), "Rprop: etas are 0.5; give a pair"),  # type: ignore[arg-type]
        (
            lambda: Rprop([weight], step_sizes=(0.1, [1.0, 0.05, 1.0])),
            "the first cannot be above the second",
        ),
        (
            lambda: Rprop([weight, shared], step_sizes=([1e-6] * 3, 50)),
            "{'params': shared, 'step_sizes': (1e-6, 50)}",
        ),
        (lambda: ASGD([weight], t0=[1.0, -1.0, 2.0]), "ASGD: t0 is -1.0 for member 1"),
        (lambda: ASGD([weight], lr=LR, alpha=[1.0, 2.0]), "lr has 3 numbers, alpha has 2 numbers"),
    ):
        with pytest.raises(UsageError) as found:
            make()
        assert words in str(found.value) and "\n" not in str(found.value)
