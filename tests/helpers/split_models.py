"""Small members whose artifacts are loaded on several devices and in several processes."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Heads(nn.Module):
    """Answers a dict with a hidden state, scores, and labels; a second entry answers one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.fc = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.trunk(x).relu()
        y = self.fc(h)
        return {"hidden": h, "logits": y, "labels": y.argmax(-1), "same": x * 2}

    def encode(self, x: Tensor) -> Tensor:
        y: Tensor = self.trunk(x)
        return y


class Cell(nn.Module):
    """Has a state that is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.back = nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.fc(x) + self.back(h))
        return h.sum(-1), h


class Scale(nn.Module):
    """Its answers to ones are its weight."""

    def __init__(self, value: float | None = None) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4) if value is None else torch.full((4,), value))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w
