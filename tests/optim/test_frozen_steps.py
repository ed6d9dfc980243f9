"""Compares members that were frozen for some steps with members alone that paused for as many steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import widepack
from optim.stepping import N, label, options_of, parameters, saved
from widepack import fuse
from widepack.optim.rates import FROZEN

FROZEN_IN = {0: range(4, 12), 1: range(3), 2: range(9, 10)}  # the steps in which a member is frozen
STEPS = 16
LR = [0.1, 0.02, 0.05]
CASES: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"momentum": 0.9, "weight_decay": 0.1}),
    ("Adam", {"lr": 0.1}),
    ("Adam", {"lr": LR, "betas": ([0.9, 0.5, 0.1], 0.99), "amsgrad": True, "weight_decay": 0.1}),
    ("AdamW", {"lr": LR, "weight_decay": 0.1}),
    ("Adadelta", {"weight_decay": 0.1}),
    ("RMSprop", {"momentum": 0.9, "centered": True, "weight_decay": 0.1}),
    ("Adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.5, "weight_decay": 0.1}),
    ("Adamax", {"lr": LR, "weight_decay": 0.1}),
    ("NAdam", {"weight_decay": 0.1}),
    ("NAdam", {"lr": LR, "betas": (0.9, [0.999, 0.7, 0.99]), "momentum_decay": [4e-3, 0.0, 0.5]}),
    ("RAdam", {"lr": 0.1, "weight_decay": 0.1}),
    ("RAdam", {"lr": LR, "betas": (0.9, [0.999, 0.5, 0.0])}),
    ("Rprop", {"lr": LR}),
    ("ASGD", {"lr": 0.1, "lambd": 0.3, "t0": 5.0, "weight_decay": 0.1}),
    ("ASGD", {"lr": LR, "t0": [1e6, 3.0, 0.0]}),
]


def gradient(k: int, p: Tensor) -> Tensor:
    return torch.randn(p.shape, generator=torch.Generator().manual_seed(100 + k), dtype=p.dtype)


def steps(optimizer: torch.optim.Optimizer, params: list[Tensor], numbers: range) -> None:
    """Performs steps as a fused module with frozen members does: their gradients are zero."""
    for k in numbers:
        frozen = tuple(i for i, when in FROZEN_IN.items() if k in when)
        for p in params:
            setattr(p, FROZEN, frozen)
            p.grad = gradient(k, p)
            p.grad[list(frozen)] = 0.0
        optimizer.step()


@pytest.mark.parametrize(("name", "options"), CASES, ids=label)
def test_a_frozen_member_continues_as_alone_after_a_pause(name: str, options: dict[str, Any]) -> None:
    together = parameters()
    steps(getattr(widepack.optim, name)(together, **options), together, range(STEPS))
    for i in range(N):
        alone = parameters(i=i)
        own = getattr(torch.optim, name)(alone, foreach=False, **options_of(options, i))
        for k in range(STEPS):
            if k not in FROZEN_IN[i]:
                for p, a in zip(parameters(), alone):
                    a.grad = gradient(k, p)[i]
                own.step()
        for p, a in zip(together, alone):
            torch.testing.assert_close(p[i], a, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("at", [6, 13], ids=["while a member is frozen", "afterwards"])
@pytest.mark.parametrize(("name", "options"), CASES, ids=label)
def test_a_run_with_a_pause_continues_from_a_file_bit_for_bit(
    name: str, options: dict[str, Any], at: int
) -> None:
    uninterrupted, params = parameters(), parameters()
    steps(getattr(widepack.optim, name)(uninterrupted, **options), uninterrupted, range(STEPS))
    first = getattr(widepack.optim, name)(params, **options)
    steps(first, params, range(at))
    second = getattr(widepack.optim, name)(params)
    second.load_state_dict(torch.load(saved(first.state_dict()), weights_only=True))
    steps(second, params, range(at, STEPS))
    assert all(torch.equal(a, b) for a, b in zip(params, uninterrupted))


def test_the_step_count_is_one_number_while_all_members_have_the_same() -> None:
    params = parameters()
    optimizer = widepack.optim.Adam(params)
    for p in params:
        p.grad = torch.ones_like(p)
    counts: list[Any] = []
    for frozen in ((), (0, 1, 2), (1,), (0, 2), ()):
        for p in params:
            setattr(p, FROZEN, frozen)
        optimizer.step()
        counts.append(optimizer.state[params[1]]["step"].tolist())
    assert counts == [1, 1, [2, 1, 2], 2, 3]


def test_members_are_removed_after_a_pause() -> None:
    torch.manual_seed(0)
    members, x = [nn.Linear(6, 2).double() for _ in range(N)], torch.randn(8, 6).double()
    fused = fuse(members, x, validate=False).train()
    optimizer = widepack.optim.NAdam(fused.parameters(), lr=0.02)
    own = torch.optim.NAdam(members[2].parameters(), lr=0.02)

    def step() -> None:
        optimizer.zero_grad()
        fused(x).square().mean((1, 2)).sum().backward()
        optimizer.step()
        if not fused.frozen_members:
            own.zero_grad()
            members[2](x).square().mean().backward()
            own.step()

    step()
    fused.freeze(2)
    step()
    fused.unfreeze(2)
    step()
    fused.remove(0, optimizer=optimizer)
    assert optimizer.state[fused.get_parameter("weight")]["step"].tolist() == [3.0, 2.0]
    step()
    torch.testing.assert_close(fused.get_parameter("weight")[1], members[2].weight, rtol=1e-12, atol=1e-12)
