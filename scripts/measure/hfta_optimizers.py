"""Trains with the optimizers and schedulers of HFTA's tests: N members at once, and each alone.

The members have two convolutions and two linear layers. They are fused, and their weights get the same random
gradients as those of the members alone: ten steps of an optimizer, or two steps in each of 30 epochs of a
scheduler. Every member has its own learning rate, betas and so on.

| way | the bound |
|---|---|
| `float32` | that of `database_check`, against the same training in float64 |
| `float64` | 1e-12 of each weight |

HFTA calls a training partially fused if some layers are kept apart. Here one optimizer has all weights, so
these cases differ in their options only, which are drawn at random for each member.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from database_check import Differs, Outcome, out_of_bounds, raised
from hfta_grids import CONTAINERS, OPTIMIZERS, Options, cases
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

import widepack
from widepack.optim import PerMember, PerMemberScheduler

WAYS = ("float32", "float64")
STEPS, EPOCHS, STEPS_OF_AN_EPOCH = 10, 30, 2
CLOSE = 1e-12
WideOptimizer = Callable[..., Any]


class Net(nn.Module):
    """Two convolutions and two linear layers, each with an input of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 16, 3, 3), nn.Conv2d(64, 32, 5, 5)
        self.linear1, self.linear2 = nn.Linear(10, 30), nn.Linear(100, 20)

    def forward(self, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, ...]:
        return self.conv1(a), self.conv2(b), self.linear1(c), self.linear2(d)


@dataclass
class Training:
    """One case.

    Attributes:
        members: The number of members.
        optimizer: The name of the optimizer, in `torch.optim` and in `widepack.optim`.
        options: Its options. Each has one number, or one for each member.
        schedule: The options of StepLR, or none.
        epochs: What the scheduler's steps are given: nothing (None), or the epoch of each member.
    """

    members: int
    optimizer: str
    options: Options
    schedule: Options = field(default_factory=dict)
    epochs: Sequence[Any] = ()


def trainings(family: str) -> Iterator[tuple[str, Training]]:
    """Yields the name of each case of a family, and the case."""
    for name, options in cases(OPTIMIZERS[family]):
        key = f"{family}/{name}"
        chance = random.Random(key)
        members = options.pop("members")
        partial = family.endswith("partially fused")
        if family.startswith("StepLR"):
            yield key, _scheduled(members, options, partial, chance)
        elif partial:
            given = {**_random_options(family.partition(",")[0], members, chance), **options}
            yield key, Training(members, family.partition(",")[0], given)
        else:
            yield key, Training(members, family, options)


def _random_options(optimizer: str, members: int, chance: random.Random) -> Options:
    """Returns options that are drawn for each member, from the ranges of HFTA's tests."""

    def each(low: float, high: float) -> list[float]:
        return [chance.uniform(low, high) for _ in range(members)]

    if optimizer == "Adam":
        betas = (each(0.8, 0.99), each(0.998, 0.9999))
        return {"lr": each(1e-4, 1e-2), "betas": betas, "eps": each(1e-9, 1e-7), "weight_decay": each(0, 0.3)}
    return {
        "lr": each(0.5, 2),
        "rho": each(0.7, 0.99),
        "eps": each(1e-7, 1e-5),
        "weight_decay": each(0, 0.3),
    }


def _scheduled(members: int, schedule: Options, partial: bool, chance: random.Random) -> Training:
    """Returns a training with a schedule. A step of it has the epochs of the members, or none, by chance."""

    def each(low: int, high: int) -> list[int]:
        return [chance.randint(low, high) for _ in range(members)]

    lr: Any = [chance.uniform(0, 1) for _ in range(members)]
    if partial:
        gammas = [chance.uniform(0.1, 0.3) for _ in range(members)]
        schedule = {"step_size": each(2, 8), "gamma": gammas, "last_epoch": each(5, 11)}
    elif chance.random() < 0.5:
        lr = chance.uniform(0, 1)
    makes = list(CONTAINERS.values())
    epochs = [chance.choice(makes)(each(5, 15)) if chance.random() < 0.5 else None for _ in range(EPOCHS)]
    return Training(members, "Adadelta", {"lr": lr}, schedule, epochs)


def of_member(name: str, option: Any, i: int) -> Any:
    """Returns member i's number of an option, as a number of Python."""
    if name == "betas":
        return tuple(of_member("", part, i) for part in option)
    if isinstance(option, (int, float)):
        return option
    return option[i].item() if hasattr(option[i], "item") else option[i]


def outcome_of_training(training: Training, way: str, wide: WideOptimizer | None = None) -> Outcome:
    """Runs one case in a way, and compares each member with its training alone.

    Args:
        training: The case.
        way: One of `WAYS`.
        wide: The optimizer of all members, which is called with parameters and options. Default: that of
            `widepack.optim` with the training's name.

    Returns:
        How the case ended.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates the epoch that a scheduler's step is given
        try:
            _check(training, getattr(torch, way), wide or getattr(widepack.optim, training.optimizer))
        except Differs as e:
            return Outcome("wrong", str(e))
        except widepack.WidepackError as e:
            return Outcome("refused", f"{type(e).__name__}: {' '.join(str(e).split())}")
    return Outcome("right")


def _check(training: Training, dtype: torch.dtype, wide: WideOptimizer) -> None:
    nets = _nets(training.members, dtype)
    sample = tuple(torch.randn(2, *s, dtype=dtype) for s in ((3, 7, 7), (64, 5, 5), (10,), (100,)))
    fused = widepack.fuse(nets, sample, validate=False)
    together = _Together(training, wide, dict(fused.named_parameters()))
    alone = [_Alone(training, i, dict(copy.deepcopy(n).named_parameters())) for i, n in enumerate(nets)]
    exact = [
        _Alone(training, i, dict(copy.deepcopy(n).double().named_parameters())) for i, n in enumerate(nets)
    ]
    generator = torch.Generator().manual_seed(5)
    for epoch in training.epochs or (None,):
        for _ in range(STEPS_OF_AN_EPOCH if training.schedule else STEPS):
            drawn = {
                n: torch.rand(p.shape, generator=generator, dtype=dtype)
                for n, p in together.parameters.items()
            }
            together.step(drawn)
            for i, (own, true) in enumerate(zip(alone, exact)):
                own.step({n: g[i] for n, g in drawn.items()})
                true.step({n: raised(g[i]) for n, g in drawn.items()})
        for trained in (together, *alone, *exact):
            trained.end_epoch(epoch)
        rates = together.rates()
        for i, own in enumerate(alone):
            if abs(rates[i] - own.rates()[0]) > CLOSE:
                raise Differs(f"the learning rate of member {i} is {rates[i]}, its own is {own.rates()[0]}")
    for name, p in together.parameters.items():
        own_rows, true_rows = ([t.parameters[name].detach() for t in group] for group in (alone, exact))
        _compare(name, list(p.detach()), own_rows, true_rows)


def _compare(name: str, wide: list[Tensor], own: list[Tensor], exact: list[Tensor]) -> None:
    if own[0].dtype == torch.float32:
        problem = out_of_bounds(wide, own, exact)
        if problem:
            raise Differs(f"{name}: {problem}")
        return
    for i, (w, a) in enumerate(zip(wide, own)):
        if not torch.allclose(w, a, rtol=CLOSE, atol=CLOSE):
            raise Differs(f"{name} of member {i} differs by {float((w - a).abs().max()):.1e}")


def _nets(members: int, dtype: torch.dtype) -> list[nn.Module]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return [Net().to(dtype) for _ in range(members)]


class _Trained:
    """Parameters by name, with their optimizer and scheduler."""

    optimizer: Any
    scheduler: Any = None

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        self.parameters = parameters

    def step(self, gradients: dict[str, Tensor]) -> None:
        self.optimizer.zero_grad()
        for name, gradient in gradients.items():
            self.parameters[name].grad = gradient.clone()
        self.optimizer.step()

    def end_epoch(self, epoch: Any) -> None:
        """Makes a step of the scheduler. epoch: what it is given: nothing, or the epoch of each member."""
        if self.scheduler is not None:
            self.scheduler.step(self.epoch_of(epoch))

    def epoch_of(self, epoch: Any) -> Any:
        return epoch

    def start(self, schedule: Options) -> None:
        """Gives the groups of the optimizer the rate at which a schedule began that goes on."""
        last = schedule.get("last_epoch", -1)
        if not isinstance(last, int) or last != -1:
            for group in self.optimizer.param_groups:
                group["initial_lr"] = group["lr"]


class _Together(_Trained):
    """The weights of all members."""

    def __init__(self, training: Training, wide: WideOptimizer, parameters: dict[str, nn.Parameter]) -> None:
        super().__init__(parameters)
        self.members = training.members
        self.optimizer = wide(parameters.values(), **training.options)
        if training.schedule:
            self.start(training.schedule)
            self.scheduler = PerMemberScheduler(
                self.optimizer, lambda o, i: StepLR(o, **_of_member_all(training.schedule, i))
            )

    def rates(self) -> list[float]:
        rate = self.optimizer.param_groups[0]["lr"]
        return list(rate) if isinstance(rate, PerMember) else [rate] * self.members


class _Alone(_Trained):
    """The weights of one member."""

    def __init__(self, training: Training, i: int, parameters: dict[str, nn.Parameter]) -> None:
        super().__init__(parameters)
        self.number = i
        make = getattr(torch.optim, training.optimizer)
        self.optimizer = make(parameters.values(), **_of_member_all(training.options, i))
        if training.schedule:
            self.start(training.schedule)
            self.scheduler = StepLR(self.optimizer, **_of_member_all(training.schedule, i))

    def epoch_of(self, epoch: Any) -> Any:
        return None if epoch is None else of_member("", epoch, self.number)

    def rates(self) -> list[float]:
        return [self.optimizer.param_groups[0]["lr"]]


def _of_member_all(options: Options, i: int) -> Options:
    return {k: of_member(k, v, i) for k, v in options.items()}
