"""Small networks of several tests: rows that are independent, and a state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Any:
        return self.layers(x)


class Normed(nn.Module):
    """Norms, vectors of the members at both sides, a residual, and a weight that is multiplied as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 8), nn.LayerNorm(8)
        self.scale, self.shift = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(1, 8))
        self.mix = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.norm(self.first(x))
        y = y + F.gelu(self.scale * y - self.shift) @ self.mix
        return {"y": y, "best": y.argmax(-1), "parts": y.view(-1, 2, 4).softmax(-1)}


class Trunk(nn.Module):
    """A trunk that all members share before and between layers of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.last = nn.Linear(8, 8), nn.Linear(8, 3, bias=False)
        with torch.random.fork_rng():
            torch.manual_seed(7)
            self.trunk, self.middle = nn.Linear(6, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.middle(self.head(self.trunk(x).relu()).relu()))


class Shifted(Trunk):
    """The same with an input that all rows share."""

    def forward(self, x: Tensor, offset: Tensor) -> Any:  # type: ignore[override]
        return self.last(self.middle(self.head(self.trunk(x).relu() + offset).relu()))


class EvenFromFour(nn.Module):
    """Takes an even number of rows from 4 on, so that smaller groups are filled up, and multiplies by 3."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 3, 1)

    def forward(self, x: Tensor) -> Any:
        if x.shape[0] % 2:
            raise ValueError("takes 4, 6, 8, ... rows")
        return self.conv(x) * torch.ones(x.shape[0])[:3].sum()


class FilledTrunk(EvenFromFour):
    """The same after a trunk that all members share."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(7)
            self.trunk = nn.Conv1d(2, 2, 1)

    def forward(self, x: Tensor) -> Any:
        return super().forward(self.trunk(x).relu())
