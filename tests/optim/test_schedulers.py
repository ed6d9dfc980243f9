"""Compares schedulers over N members with those of torch, member by member."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from optim.stepping import LR, N, of_member, parameters, saved, steps
from widepack import UsageError, fuse
from widepack.optim import (
    ASGD,
    SGD,
    Adam,
    AdamW,
    PerMember,
    PerMemberScheduler,
    Rprop,
    clip_grad_norm_,
)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.StepLR(o, 2, 0.5),
        lambda o: lr_scheduler.CosineAnnealingLR(o, 8, eta_min=0.001),
        lambda o: lr_scheduler.LambdaLR(o, lambda k: 1 / (1 + k)),
        lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=4),
        lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    ],
)
def test_schedulers_change_every_rate(make: Any) -> None:
    params = parameters()
    optimizer = SGD(params, lr=LR)
    scheduler = make(optimizer)
    references = [torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=r) for r in LR]
    reference_schedules = [make(o) for o in references]
    for _ in range(6):
        optimizer.step()
        scheduler.step()
        for o, s in zip(references, reference_schedules):
            o.step()
            s.step()
        assert list(optimizer.param_groups[0]["lr"]) == pytest.approx(
            [o.param_groups[0]["lr"] for o in references]
        )
    state = {k: v for k, v in scheduler.state_dict().items() if k != "lr_lambdas"}
    assert torch.load(saved(state), weights_only=True)["base_lrs"] == [PerMember(LR)]


@pytest.mark.parametrize("lr", [0.1, LR], ids=["one rate", "a rate a member"])
def test_a_factor_for_each_member_equals_a_schedule_for_each_member(lr: Any) -> None:
    """Compares LambdaLR with a PerMember (docs/how-to/migrate.md) with N optimizers and N schedulers."""
    factors = [0.9, 0.5, 0.1][:N]
    assert len(factors) == N

    def schedule(optimizer: torch.optim.Optimizer, factor: Any) -> Any:
        return lr_scheduler.LambdaLR(optimizer, lambda k: factor(k))

    wide = parameters()
    ours = AdamW(wide, lr=lr)
    moved = schedule(ours, lambda k: PerMember([f**k for f in factors]))
    alone = [parameters(i=i) for i in range(N)]
    references = [torch.optim.AdamW(p, lr=of_member(lr, i), foreach=False) for i, p in enumerate(alone)]
    schedules = [schedule(o, lambda k, f=f: f**k) for o, f in zip(references, factors)]
    for step in range(4):
        steps(ours, wide, 1, step)
        moved.step()
        for i, (o, s) in enumerate(zip(references, schedules)):
            steps(o, alone[i], 1, step, i)
            s.step()
        assert list(ours.param_groups[0]["lr"]) == pytest.approx(
            [o.param_groups[0]["lr"] for o in references]
        )
    for i in range(N):
        for w, own in zip(wide, alone[i]):
            torch.testing.assert_close(w[i], own, rtol=1e-12, atol=1e-12)


SCHEDULES: list[tuple[str, Any]] = [
    ("step", lambda o, i: lr_scheduler.StepLR(o, [1, 2, 3][i], [0.5, 0.1, 0.9][i])),
    ("cosine", lambda o, i: lr_scheduler.CosineAnnealingLR(o, [4, 8, 16][i])),
    ("lambda", lambda o, i: lr_scheduler.LambdaLR(o, lambda k: 1 / (1 + k + i))),
    ("one cycle", lambda o, i: lr_scheduler.OneCycleLR(o, [0.1, 0.2, 0.3][i], total_steps=12)),
    (
        "sequential",
        lambda o, i: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], [2 + i]
        ),
    ),
]


@pytest.mark.parametrize(("name", "make"), SCHEDULES, ids=[n for n, _ in SCHEDULES])
@pytest.mark.parametrize("lr", [0.3, LR], ids=["one rate", "a rate a member"])
def test_each_member_has_its_own_schedule(name: str, make: Any, lr: Any) -> None:
    params = parameters()
    optimizer = Adam(params, lr=lr)
    scheduler = PerMemberScheduler(optimizer, make)
    alone = [torch.optim.Adam([nn.Parameter(torch.zeros(1))], lr=of_member(lr, i)) for i in range(N)]
    own = [make(o, i) for i, o in enumerate(alone)]
    for _ in range(8):
        optimizer.step()
        scheduler.step()
        for o, s in zip(alone, own):
            o.step()
            s.step()
        group = optimizer.param_groups[0]
        for i, o in enumerate(alone):
            rate = group["lr"][i] if isinstance(group["lr"], PerMember) else group["lr"]
            beta = group["betas"][0][i] if isinstance(group["betas"][0], PerMember) else group["betas"][0]
            assert (rate, beta) == pytest.approx((o.param_groups[0]["lr"], o.param_groups[0]["betas"][0]))
    assert scheduler.get_last_lr() == [optimizer.param_groups[0]["lr"]]


def test_options_that_no_scheduler_changes_stay() -> None:
    params = parameters()
    optimizer = ASGD(params, lr=LR, alpha=[0.75, 0.5, 1.0])
    scheduler = PerMemberScheduler(optimizer, lambda o, i: lr_scheduler.StepLR(o, [1, 2, 3][i], 0.5))
    for _ in range(4):
        optimizer.step()
        scheduler.step()
    assert list(optimizer.param_groups[0]["lr"]) == pytest.approx([0.1 / 16, 0.02 / 4, 0.5 / 2])
    pairs = Rprop(params, etas=([0.5, 0.3, 0.9], 1.2))
    PerMemberScheduler(pairs, lambda o, i: lr_scheduler.ConstantLR(o, [1.0, 0.5, 0.1][i]))
    assert pairs.param_groups[0]["etas"] == (PerMember([0.5, 0.3, 0.9]), 1.2)
    assert list(pairs.param_groups[0]["lr"]) == pytest.approx([0.01, 0.005, 0.001])


def plateau(optimizer: torch.optim.Optimizer, i: int = 0) -> Any:
    return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)


def test_a_plateau_of_one_member_reduces_its_rate_only() -> None:
    params = parameters()
    optimizer = SGD(params, lr=0.1)
    scheduler = PerMemberScheduler(optimizer, plateau)
    alone = [torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1) for _ in range(N)]
    own = [plateau(o) for o in alone]
    losses = [[1.0, 1.0, 1.0], [1.0, 0.9, 1.0], [1.0, 0.8, 0.5], [1.0, 0.7, 0.6], [float("nan"), 0.6, 0.7]]
    for k, row in enumerate(losses):
        scheduler.step(torch.tensor(row) if k % 2 else row)
        for s, value in zip(own, row):
            s.step(value)
        if k == 2:
            saved = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
    assert list(optimizer.param_groups[0]["lr"]) == pytest.approx([o.param_groups[0]["lr"] for o in alone])
    assert optimizer.param_groups[0]["lr"] == PerMember([0.025, 0.1, 0.05])

    again = SGD(params, lr=0.1)
    resumed = PerMemberScheduler(again, plateau)
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    for row in losses[3:]:
        resumed.step(row)
    assert again.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_groups_of_shared_weights_keep_their_rate() -> None:
    models = [nn.Sequential(nn.Linear(4, N), nn.ReLU(), nn.Linear(N, 2)) for _ in range(N)]
    for m in models[1:]:
        m[0].load_state_dict(models[0][0].state_dict())
    fused = fuse(models, torch.randn(2, 4), share=["0.*"], validate=False)
    own = [p for n, p in fused.named_parameters() if n.startswith("2.")]
    shared = [p for n, p in fused.named_parameters() if n.startswith("0.")]
    with pytest.raises(UsageError, match="every group of the optimizer has a weight without a member axis"):
        PerMemberScheduler(SGD(fused.parameters(), lr=0.1), plateau)
    optimizer = SGD([{"params": own}, {"params": shared}], lr=0.1)
    scheduler = PerMemberScheduler(optimizer, plateau)
    for _ in range(3):
        scheduler.step([1.0, 1.0 / (1 + scheduler.schedulers[1].last_epoch), 1.0])
    assert scheduler.get_last_lr() == [PerMember([0.05, 0.1, 0.05]), 0.1]
    fused(torch.randn(2, 4)).sum().backward()
    with pytest.raises(UsageError, match=r"parameter 0, \[3, 4\], is one weight for all members"):
        clip_grad_norm_(fused.parameters(), 1.0)


def test_messages() -> None:
    weight = nn.Parameter(torch.zeros(N, 2))
    optimizer = SGD([weight], lr=LR)
    scheduler = PerMemberScheduler(optimizer, plateau)
    calls: list[tuple[Any, str]] = [
        (
            lambda: PerMemberScheduler(torch.optim.SGD([weight]), plateau),  # type: ignore[arg-type]
            "has one rate for all members; use an optimizer of widepack.optim",
        ),
        (
            lambda: PerMemberScheduler(SGD([weight, nn.Parameter(torch.zeros(5, 2))]), plateau),
            "the number of members is not known",
        ),
        (lambda: scheduler.step([1.0, 2.0]), "there are 2 numbers for 3 members"),
        (scheduler.step, "ReduceLROnPlateau of member 0 needs a number for each member"),
        (lambda: scheduler.load_state_dict({}), "the state has no list 'schedulers'"),
        (
            lambda: scheduler.load_state_dict({"schedulers": [{}]}),
            "the state has schedulers of 1 members, and the optimizer has 3",
        ),
    ]
    for call, words in calls:
        with pytest.raises(UsageError) as found:
            call()
        assert words in str(found.value) and "\n" not in str(found.value)
    weight.grad = torch.ones(N, 2)
    of_torch = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    with pytest.raises(UsageError, match=r"widepack.optim.PerMemberScheduler\(optimizer"):
        for _ in range(3):
            of_torch.step(1.0)
