"""A member that pads an odd length to an even one. A program that is captured at an even length is valid for
even lengths only.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import generator, trained

N = 3
RECURRENT = False
INPUTS = ["x=float32[B,T,8]", "T=2..64"]


class Pairs(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.merge = nn.Linear(16, width)
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, 8]
        if x.shape[1] % 2:
            x = F.pad(x, (0, 0, 0, 1))
        pairs = torch.cat([x[:, 0::2], x[:, 1::2]], dim=2)  # [B, T / 2, 16]
        return self.head(torch.relu(self.merge(pairs)).mean(dim=1))


def model(width: int = 32) -> nn.Module:
    return Pairs(width)


def sample(batch: int, seed: int, length: int = 6) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    return (torch.randn(batch, length, 8, generator=generator(seed)),), {}


def member(i: int) -> nn.Module:
    return trained(model, 1300 + i)
