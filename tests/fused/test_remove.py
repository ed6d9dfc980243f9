"""Tests members that are removed from a fused module: they cost nothing more, and the others train on."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from fusing import Cnn, Mlp, copies, draw, members, stacked
from torch import Tensor, nn
from torch.optim import lr_scheduler

import widepack
from widepack import UsageError, fuse
from widepack.fused import captures
from widepack.optim import PerMember, PerMemberScheduler

F64 = torch.float64
LR = [0.01, 0.02, 0.03, 0.015]
STOPS = {1: 2, 3: 3, 0: 5}  # member: the number of steps after which it stops; member 2 makes 7
STEPS = 7


def of_member(option: Any, i: int) -> Any:
    """Returns member i's value of an option."""
    if isinstance(option, tuple):
        return tuple(of_member(part, i) for part in option)
    return option[i] if isinstance(option, list) else option


def inputs(step: int, count: int = 4) -> Tensor:
    return draw(count, 5, 3, 6, 6, seed=step, dtype=F64)


def loss(answers: Tensor, step: int) -> Tensor:
    return (answers - step / 10).square().mean(-1).mean(-1)


def half_after(o: torch.optim.Optimizer, i: int) -> Any:
    return lr_scheduler.StepLR(o, [1, 2, 3, 2][i], 0.5)


RUNS: dict[str, tuple[Any, Any, dict[str, Any], Any]] = {
    "adamw": (widepack.optim.AdamW, torch.optim.AdamW, {"lr": LR}, half_after),
    "sgd": (
        widepack.optim.SGD, torch.optim.SGD, {"lr": LR, "momentum": [0.9, 0.0, 0.5, 0.8]}, None,
    ),
    "nadam": (
        widepack.optim.NAdam, torch.optim.NAdam, {"lr": 0.01, "momentum_decay": [0.1, 0.2, 0.0, 0.4]}, None,
    ),
    "asgd": (widepack.optim.ASGD, torch.optim.ASGD, {"lr": LR, "t0": [0.0, 1.0, 2.0, 9.0]}, None),
    "torch-adam": (torch.optim.Adam, torch.optim.Adam, {"lr": 0.01, "amsgrad": True}, None),
    "torch-sgd": (torch.optim.SGD, torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}, None),
}  # fmt: skip


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("name", RUNS)
def test_each_member_equals_the_member_trained_alone_and_stopped_at_its_step(name: str) -> None:
    make, torchs, options, schedule = RUNS[name]
    modules = [m.train() for m in members(Cnn, 4, dtype=F64)]
    fused = fuse(modules, inputs(0)[0], validate=False)
    parameters = list(fused.parameters())
    optimizer = make(fused.parameters(), **options)
    scheduler = PerMemberScheduler(optimizer, schedule) if schedule else None
    finished: dict[int, nn.Module] = {}
    for step in range(STEPS):
        left = list(fused.original_numbers)
        optimizer.zero_grad()
        losses = loss(fused.each(inputs(step)[left]), step)  # the graph of a step lives during the next one
        torch.autograd.backward(losses.sum())
        optimizer.step()
        if scheduler:
            scheduler.step()
        stop = [i for i in left if STOPS.get(i) == step + 1]
        out = fused.remove(*(left.index(i) for i in stop), optimizer=optimizer, scheduler=scheduler)
        finished.update(zip(stop, out))
    assert fused.original_numbers == (2,) and all(a is b for a, b in zip(parameters, fused.parameters()))
    finished[2] = fused.unfuse()[0]
    for i, module in enumerate(copies(modules)):
        own = torchs(module.parameters(), **{k: of_member(v, i) for k, v in options.items()})
        rates = schedule(own, i) if schedule else None
        for step in range(STOPS.get(i, STEPS)):
            own.zero_grad()
            torch.autograd.backward(loss(module(inputs(step)[i]), step))
            own.step()
            if rates:
                rates.step()
        for key, value in module.state_dict().items():
            torch.testing.assert_close(finished[i].state_dict()[key], value, rtol=1e-8, atol=1e-8)
            assert key.endswith("tracked") or not torch.equal(value, modules[i].state_dict()[key]), key


@pytest.mark.extended
def test_nothing_is_captured_again_and_each_program_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = [m.train() for m in members(Cnn, 4, dtype=F64)]
    fused = fuse(modules, inputs(0)[0])
    for training in (True, False):
        fused.train(training)(inputs(0)[0])

    def refuse(*args: Any) -> Any:
        raise AssertionError("captured again")

    monkeypatch.setattr(captures, "capture_member", refuse)
    removed = fused.remove(-1, 0)
    for module, i in zip(removed, (3, 0)):
        assert type(module) is Cnn
        assert all(torch.equal(p, modules[i].get_parameter(n)) for n, p in module.named_parameters())
    for training in (True, False):
        fused.train(training)
        alone = copies(fused.unfuse())
        torch.testing.assert_close(
            fused.each(inputs(1)[1:3]), torch.stack([m(x) for m, x in zip(alone, inputs(1)[1:3])])
        )
        assert all(r.checked for e in fused.__dict__["_entries"].values() for r in e.runners)
        for name, value in stacked(alone).items():
            torch.testing.assert_close(fused.state_dict()[name], value)


def test_gradients_states_and_options_lose_the_rows() -> None:
    fused = fuse([m.train() for m in members(Cnn, 4)], inputs(0)[0].float(), validate=False)
    optimizer = widepack.optim.Adam(fused.parameters(), lr=LR, betas=([0.9, 0.8, 0.7, 0.6], 0.99))
    fused(inputs(0)[0].float()).square().sum().backward()
    optimizer.step()
    weight = fused.conv1.weight
    gradient, mean = weight.grad.clone(), optimizer.state[weight]["exp_avg"].clone()
    assert fused.remove() == [] and len(fused) == 4
    fused.remove(2, optimizer=[optimizer])
    assert fused.conv1.weight is weight and weight.shape == (3, 6, 3, 3, 3) and weight.is_leaf
    assert torch.equal(weight.grad, gradient[[0, 1, 3]])
    assert torch.equal(optimizer.state[weight]["exp_avg"], mean[[0, 1, 3]])
    group = optimizer.param_groups[0]
    assert group["lr"] == PerMember([0.01, 0.02, 0.015]) == optimizer.defaults["lr"]
    assert group["betas"] == (PerMember([0.9, 0.8, 0.6]), 0.99)
    assert float(optimizer.state[weight]["step"]) == 1
    assert fused.norm1.num_batches_tracked.shape == (3,)
    assert len(fused) == 3 and fused.original_numbers == (0, 1, 3)
    fused.remove(1, optimizer=optimizer)
    assert list(fused.original_numbers) == [0, 3]


def test_a_backward_pass_of_an_earlier_call_is_refused() -> None:
    fused = fuse([m.train() for m in members(Cnn, 2)], inputs(0)[0].float(), validate=False)
    earlier = fused(inputs(0)[0].float()).square().sum()
    fused.remove(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        earlier.backward()
    fused.zero_grad()
    fused(inputs(0)[0].float()).square().sum().backward()
    assert fused.conv1.weight.grad.shape == (1, 6, 3, 3, 3)


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("make", [widepack.optim.AdamW, torch.optim.AdamW, torch.optim.SGD])
def test_an_optimizer_that_still_has_the_rows_does_not_step(make: Any) -> None:
    fused = fuse([m.train() for m in members(Cnn, 3)], inputs(0)[0].float(), validate=False)
    options: dict[str, Any] = {"momentum": 0.9} if make is torch.optim.SGD else {}
    optimizer = make(fused.parameters(), lr=0.01, **options)

    def step() -> None:
        optimizer.zero_grad()
        fused(inputs(0)[0].float()).square().sum().backward()
        optimizer.step()

    step()
    fused.remove(0)
    before = {n: p.clone() for n, p in fused.named_parameters()}
    with pytest.raises(UsageError) as found:
        step()
    assert "and 2 members are left in the fused module" in str(found.value)
    assert "fused.remove(i, optimizer=optimizer, scheduler=scheduler)" in str(found.value)
    assert all(torch.equal(p, before[n]) for n, p in fused.named_parameters())
    optimizer = make(fused.parameters(), lr=0.01)
    step()


def test_a_scheduler_that_still_has_the_members_does_not_step() -> None:
    fused = fuse([m.train() for m in members(Cnn, 3)], inputs(0)[0].float(), validate=False)
    optimizer = widepack.optim.SGD(fused.parameters(), lr=LR[:3])
    scheduler = PerMemberScheduler(optimizer, half_after)
    fused.remove(0, optimizer=optimizer)
    with pytest.raises(UsageError, match="it has 3 members, and no group of the optimizer has as many"):
        scheduler.step()
    with pytest.raises(UsageError, match=r"give numbers from 0 to 2"):
        scheduler.keep([3])


def test_rates_in_a_scheduler_of_torch_lose_the_numbers() -> None:
    fused = fuse([m.train() for m in members(Cnn, 3)], inputs(0)[0].float(), validate=False)
    optimizer = widepack.optim.SGD(fused.parameters(), lr=LR[:3])
    schedule = lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.ConstantLR(optimizer, 0.5, 2), lr_scheduler.ExponentialLR(optimizer, 0.5)],
        [2],
    )
    fused.remove(1, scheduler=schedule)  # the optimizer of the scheduler is known
    for _ in range(4):
        optimizer.step()
        schedule.step()
    rates = list(optimizer.param_groups[0]["lr"])
    alone = []
    for lr in (LR[0], LR[2]):
        own = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)
        s = lr_scheduler.SequentialLR(
            own, [lr_scheduler.ConstantLR(own, 0.5, 2), lr_scheduler.ExponentialLR(own, 0.5)], [2]
        )
        for _ in range(4):
            own.step()
            s.step()
        alone.append(own.param_groups[0]["lr"])
    assert rates == pytest.approx(alone)


def test_copies_and_pickles_of_what_is_left(tmp_path: Any) -> None:
    modules = members(Mlp, 4)
    before = fuse(modules, draw(5, 4), validate=False)
    fused = copy.deepcopy(before).freeze(0, 3)
    fused.remove(1)
    assert len(before) == 4 and fused.frozen_members == (0, 2)
    right = torch.stack([modules[i](draw(5, 4)) for i in (0, 2, 3)])
    with torch.no_grad():
        for other in (fused, copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
            assert other.original_numbers == (0, 2, 3) and other.frozen_members == (0, 2)
            torch.testing.assert_close(other(draw(5, 4)), right)
        assert before(draw(5, 4)).shape[0] == 4
    fused.save(tmp_path / "left.wide", pt2=False)
    torch.testing.assert_close(widepack.load(tmp_path / "left.wide")(draw(5, 4)).clone(), right)


class Scaled(nn.Module):
    """A tensor in a plain attribute, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.rand(3)
        self.trunk, self.up = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.down = nn.Linear(3, 3, bias=False)
        self.down.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.trunk(x) * self.scale)))  # type: ignore[no-any-return]


def test_plain_tensors_tied_and_shared_weights() -> None:
    modules = members(Scaled, 3)
    for m in modules[1:]:
        m.trunk.load_state_dict(modules[0].trunk.state_dict())
    x = draw(5, 3)
    fused = fuse(modules, x, share=["trunk.*"])
    own = [p for n, p in fused.named_parameters() if "trunk" not in n]
    optimizer = widepack.optim.Adam([{"params": own, "lr": LR[:3]}, {"params": [fused.trunk.weight]}])
    fused(x).square().sum().backward()
    optimizer.step()
    (member,) = fused.remove(0, optimizer=optimizer)
    assert isinstance(member, Scaled) and torch.equal(member.scale, modules[0].scale)
    assert member.up.weight is member.down.weight
    assert fused.up.weight is fused.down.weight and fused.up.weight.shape == (2, 3, 3)
    assert fused.trunk.weight.shape == (3, 3) == optimizer.state[fused.trunk.weight]["exp_avg"].shape
    assert optimizer.param_groups[1]["lr"] == 1e-3
    left: list[Any] = fused.unfuse()
    assert torch.equal(left[1].scale, modules[2].scale)
    torch.testing.assert_close(fused(x), torch.stack([m(x) for m in left]))
    optimizer.zero_grad()
    fused(x).square().sum().backward()
    optimizer.step()


def test_a_packed_module_takes_fewer_channels() -> None:
    modules = members(Cnn, 3)
    fused = fuse(modules, draw(5, 3, 6, 6), packed=True, validate=False)
    fused.remove(1)
    xs = [draw(5, 3, 6, 6, seed=1), draw(5, 3, 6, 6, seed=2)]
    y = widepack.unpack(fused(widepack.pack(xs)), 2)
    torch.testing.assert_close(list(y), [modules[0](xs[0]), modules[2](xs[1])])


def test_messages() -> None:
    fused = fuse([m.train() for m in members(Cnn, 3)], draw(4, 3, 6, 6), validate=False)
    other = fuse([m.train() for m in members(Cnn, 3)], draw(4, 3, 6, 6), validate=False)
    drops = fuse(
        nn.Sequential(nn.Linear(4, 4), nn.Dropout()).eval(), draw(2, 4), n=3, dropout="on", validate=False
    )
    lbfgs: Any = torch.optim.LBFGS(fused.parameters())
    adafactor: Any = torch.optim.Adafactor(fused.parameters())
    fused(draw(4, 3, 6, 6)).square().sum().backward()
    adafactor.step()
    lbfgs.step(lambda: 1.0)
    both = widepack.optim.SGD([*fused.parameters(), *other.parameters()], lr=LR[:3])
    four = widepack.optim.SGD([nn.Parameter(torch.zeros(4))], lr=LR)
    four.param_groups[0]["params"].append(fused.conv1.weight)
    state = {n: v.clone() for n, v in fused.state_dict().items()}
    wrong: Any = 1
    mine = widepack.optim.SGD(fused.parameters(), lr=LR[:3])
    stale = PerMemberScheduler(mine, half_after)
    stale.keep([0, 1])
    foreign = torch.optim.SGD(other.parameters())
    for call, words in (
        (lambda: fused.remove(3), "there is no member 3; there are 3, counted from 0"),
        (lambda: fused.remove(0, 0), "remove: the members are [0, 0]; give each of them once"),
        (lambda: fused.remove(2, -1), "give each of them once"),
        (
            lambda: fused.remove(0, 1, 2),
            "no member would be left of 3; take the last ones with fused.unfuse()",
        ),
        (lambda: drops.remove(0), "passes of one model: fuse it again with a smaller n"),
        (lambda: fused.remove(0, optimizer=wrong), "remove: optimizer is int; give an optimizer"),
        (
            lambda: fused.remove(0, optimizer=[wrong]),
            "remove: optimizer is int; give an optimizer of widepack.optim",
        ),
        (lambda: fused.remove(0, scheduler=1), "remove: scheduler is int; give a PerMemberScheduler"),
        (lambda: fused.remove(0, scheduler=stale), "the PerMemberScheduler has 2 members, and the fused"),
        (lambda: fused.remove(0, optimizer=foreign), "SGD has no parameter of this fused module"),
        (lambda: fused.remove(0, optimizer=adafactor), "of Adafactor cannot be separated by members"),
        (lambda: fused.remove(0, optimizer=lbfgs), "of LBFGS cannot be separated by members"),
        (lambda: fused.remove(0, optimizer=both), "lr of SGD is for other parameters too"),
        (lambda: fused.remove(0, optimizer=four), "lr of SGD has 4 numbers, and the fused module has 3"),
    ):
        with pytest.raises(UsageError) as found:
            call()  # type: ignore[no-untyped-call]
        assert words in str(found.value) and "\n" not in str(found.value)
    assert len(fused) == 3 and all(torch.equal(v, state[n]) for n, v in fused.state_dict().items())
