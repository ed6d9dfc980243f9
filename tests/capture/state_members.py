"""Defines the members with state that the tests build."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from loaded import files_of
from support import double
from torch import Tensor, nn

MEMBERS = 3
QUICK: dict[str, Any] = {"pt2": False, "targets": ("cpu",)}


class Running(nn.Module):
    """Replaces its buffer by another tensor. torch.export sees this only in the root module."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        before = self.mean
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return x - before


class Cached(nn.Module):
    """Stores a window of rows (written in place), a counter, a running mean and an unsaved buffer."""

    window: Tensor
    steps: Tensor
    last: Tensor
    scale: Tensor

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.fc = nn.Linear(8, 8)
            self.out = nn.Linear(8, 4)
            self.running = Running()
            self.register_buffer("window", torch.randn(3, 8) * 0.1 if seed else torch.zeros(3, 8))
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
            self.register_buffer("last", torch.zeros(8), persistent=False)
            self.register_buffer("scale", torch.rand(8) + 0.5)

    def forward(self, x: Tensor) -> dict[str, Tensor]:  # [B, 8]
        z = torch.tanh(self.fc(self.running(x * self.scale)))
        row = z.mean(0)
        self.window.copy_(torch.cat([self.window[1:], row[None]]))
        y = self.out(z + self.window.mean(0) + 0.1 * self.last)
        self.steps += 1
        self.last = row
        return {"y": y / (1 + self.steps), "row": self.last, "window": self.window}


CARRIED = ("running.mean", "window", "steps", "last")


def save(folder: Path, make: Callable[[int], nn.Module]) -> list[str]:
    return [str(path) for path in files_of(folder, map(make, range(MEMBERS)))]


def rows(step: int, member: int | None = None, batch: int = 4) -> Tensor:
    return torch.randn(batch, 8, generator=torch.Generator().manual_seed(100 * step + (member or 0) + 1))


def stepped(
    make: Callable[[int], nn.Module],
    each: bool,
    steps: int,
    call: Callable[[nn.Module, Tensor], Any],
    raised: bool = False,
) -> list[list[Any]]:
    """Returns the answers of each member alone: [step][member]."""
    members = [make(i).eval() for i in range(MEMBERS)]
    members = [m.double() for m in members] if raised else members
    with torch.no_grad():
        found = []
        for t in range(steps):
            given = [rows(t, i if each else None) for i in range(MEMBERS)]
            given = double(given) if raised else given
            found.append([copy.deepcopy(call(m, x)) for m, x in zip(members, given)])
    return found


class Cell(nn.Module):
    """A recurrent cell: (x, h) -> (y, h_new)."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.cell = nn.GRUCell(8, 8)
            self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor, h: Tensor, gain: float = 1.0) -> tuple[Tensor, Tensor]:
        h = self.cell(x, h)
        return self.out(h) * gain, h


class Pair(Cell):
    """A module with two states, one of which never changes."""

    def forward(self, x: Tensor, kv: tuple[Tensor, Tensor]) -> Tensor:  # type: ignore[override]
        kv[0].add_(self.cell(x))
        return self.out(kv[0] * kv[1])


PAIR = (torch.ones(4, 8), (torch.ones(4, 8), torch.full((4, 8), 2.0)))
TWO = ["x=float32[B,8]", "h=float32[B,8]"]


class Counts(Cached):
    """A module with a Python number that changes at each call: the captured second step is wrong."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.calls = 0

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        y = super().forward(x)
        return {**y, "y": y["y"] * (1.0 + 0.5 * ((self.calls - 1) % 3))}
