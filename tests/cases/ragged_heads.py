"""One trunk architecture with heads of 3, 5 and 10 classes. The factory takes `state_dict=` and builds the
head that the weights need.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from . import generator, trained

N = 3
RECURRENT = False
INPUTS = ["x=float32[B,1,16,16]"]
CLASSES = (3, 5, 10)


class Ragged(nn.Module):
    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        widths = (1, width, width, 2 * width, 2 * width)
        blocks = [
            part
            for i, (before, after) in enumerate(pairwise(widths))
            for part in (
                nn.Conv2d(before, after, 3, padding=1, bias=False),
                nn.BatchNorm2d(after),
                nn.ReLU(inplace=True),
                *([nn.MaxPool2d(2)] if i % 2 else []),
            )
        ]
        self.trunk = nn.Sequential(
            *blocks, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(8 * width, 32), nn.ReLU()
        )
        self.head = nn.Linear(32, classes)

    def forward(self, x: Tensor) -> Tensor:  # [B, 1, 16, 16]
        return self.head(self.trunk(x)).log_softmax(dim=-1)  # [B, classes]


def model(state_dict: Mapping[str, Tensor] | None = None, width: int = 8, classes: int = 3) -> nn.Module:
    return Ragged(width, classes if state_dict is None else state_dict["head.weight"].shape[0])


def sample(batch: int, seed: int) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    return (torch.randn(batch, 1, 16, 16, generator=generator(seed)),), {}


def member(i: int) -> nn.Module:
    return trained(lambda: model(classes=CLASSES[i]), 1200 + i, [sample(16, 12000 + i)])
