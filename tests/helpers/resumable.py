"""Runs of training that a test interrupts, and continues in a fresh process.

Each has dropout, and most have a batch norm. `python resumable.py FOLDER FIRST LAST THREADS NAME...`
continues runs in a process of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import widepack
from widepack.optim import PerMemberScheduler

N = 3
LR = [0.05, 0.01, 0.02]


class Images(nn.Module):
    """Convolutions with a batch norm, and dropout of numbers and of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6)
        self.drop, self.drop_channels = nn.Dropout(0.3), nn.Dropout2d(0.2)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop_channels(torch.relu(self.norm(self.conv(x)))).mean((2, 3))
        return self.head(self.drop(y))  # type: ignore[no-any-return]


class Rows(nn.Module):
    """Linear layers with a batch norm whose statistics are means of all batches, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=None)
        self.drop, self.head = nn.Dropout(0.4), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(torch.relu(self.norm(self.first(x)))))  # type: ignore[no-any-return]


class Steps(nn.Module):
    """A GRU and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.drop, self.head = nn.GRU(4, 6, batch_first=True), nn.Dropout(0.3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.rnn(x)[0][:, -1]))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Run:
    """A run of training.

    Attributes:
        model: The members' class.
        shape: The inputs of one member.
        optimizer: Makes the optimizer of the parameters.
        scheduler: Makes the scheduler of the optimizer.
        dtype: The members' dtype.
        removed: The members that are removed after the first step.
        frozen: The members that are frozen after the first step.
        validate: Whether programs are compared when they are made.
    """

    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    optimizer: Callable[[Any], Any]
    scheduler: Callable[[Any], Any]
    dtype: torch.dtype = torch.float32
    removed: tuple[int, ...] = ()
    frozen: tuple[int, ...] = ()
    validate: bool = False


def _one_cycle(o: Any) -> Any:
    return PerMemberScheduler(o, lambda own, i: lr_scheduler.OneCycleLR(own, [0.1, 0.05, 0.2][i], 12))


def _plateau(o: Any) -> Any:
    return PerMemberScheduler(o, lambda own, i: lr_scheduler.ReduceLROnPlateau(own, factor=0.5, patience=0))


RUNS = {
    "images": Run(Images, (5, 2, 6, 6), lambda p: widepack.optim.AdamW(p, lr=LR), _one_cycle, validate=True),
    "rows": Run(
        Rows,
        (6, 4),
        lambda p: widepack.optim.NAdam(p, lr=LR, momentum_decay=[0.1, 0.2, 0.0]),
        _plateau,
        torch.float64,
    ),
    "steps": Run(
        Steps,
        (4, 3, 4),
        lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
        lambda o: lr_scheduler.CosineAnnealingLR(o, 12),
    ),
    "removed": Run(
        Images,
        (5, 2, 6, 6),
        lambda p: widepack.optim.SGD(p, lr=LR, momentum=[0.9, 0.8, 0.0]),
        _plateau,
        removed=(1,),
    ),
    "frozen": Run(
        Rows, (6, 4), lambda p: widepack.optim.ASGD(p, lr=LR, t0=[1.0, 2.0, 3.0]), _plateau, frozen=(0,)
    ),
}


class Training:
    """A fused module, its optimizer and its scheduler, as a script makes them at its start.

    Args:
        run: The run.
        seed: The seed of the members' weights.
    """

    def __init__(self, run: Run, seed: int) -> None:
        self.run = run
        torch.manual_seed(seed)
        models = [run.model().to(run.dtype) for _ in range(N)]
        self.fused = widepack.fuse(models, self.inputs(0)[0], validate=run.validate).train()
        self.optimizer = run.optimizer(self.fused.parameters())
        self.scheduler = run.scheduler(self.optimizer)

    def inputs(self, step: int) -> Tensor:
        g = torch.Generator().manual_seed(step)
        return torch.randn((N, *self.run.shape), generator=g).to(self.run.dtype)

    def stop(self) -> None:
        """Removes and freezes the members of the run."""
        self.fused.remove(*self.run.removed, optimizer=self.optimizer, scheduler=self.scheduler)
        self.fused.freeze(*self.run.frozen)

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            x = self.inputs(step)[list(self.fused.original_numbers)]
            self.optimizer.zero_grad()
            losses = (self.fused.each(x) - step / 10).square().mean((1, 2))
            losses.sum().backward()
            widepack.optim.clip_grad_norm_(self.fused.parameters(), 1.0)
            self.optimizer.step()
            if isinstance(self.scheduler, PerMemberScheduler):
                self.scheduler.step(*([losses.detach()] if self.run.scheduler is _plateau else []))
            else:
                self.scheduler.step()
            if step == 0:
                self.stop()

    def state(self) -> dict[str, Any]:
        return {
            "fused": self.fused.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "random": torch.get_rng_state(),
            "frozen": self.fused.frozen_members,
            "members": self.fused.original_numbers,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continues from a state, in the order of docs/how-to/train.md."""
        gone = [i for i in range(len(self.fused)) if i not in state["members"]]
        self.fused.remove(*gone, optimizer=self.optimizer, scheduler=self.scheduler)
        self.fused.freeze(*state["frozen"])
        self.fused.load_state_dict(state["fused"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["random"])


def resume(folder: Path, first: int, last: int, names: Sequence[str]) -> None:
    """Continues each run from its file, and writes its state at the end."""
    for name in names:
        training = Training(RUNS[name], seed=99)  # other weights, which the state replaces
        training.load(torch.load(folder / f"{name}.pt", weights_only=True))
        training.train(first, last)
        torch.save(training.state(), folder / f"{name}.resumed.pt")


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[4]))
    resume(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[5:])
