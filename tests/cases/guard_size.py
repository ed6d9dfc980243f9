"""A member that takes another branch for batches over 100. A program that is captured at a small batch must
refuse a large one.
"""

from typing import Any

import torch
from torch import Tensor, nn

from . import generator, trained

N = 3
RECURRENT = False
INPUTS = ["x=float32[B,16]"]


class Sized(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(16, width)
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:  # [B, 16]
        if x.shape[0] > 100:
            x = x - x.mean(dim=0)
        return self.head(torch.tanh(self.inner(x)))


def model(width: int = 32) -> nn.Module:
    return Sized(width)


def sample(batch: int, seed: int) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    return (torch.randn(batch, 16, generator=generator(seed)),), {}


def member(i: int) -> nn.Module:
    return trained(model, 1400 + i)
