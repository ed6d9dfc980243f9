"""A frozen convolutional trunk and trained heads: the members' trunks are equal bit for bit, running
statistics too.
"""

from typing import Any

import torch
from torch import Tensor, nn

from . import generator, trained

N = 5
RECURRENT = False
INPUTS = ["x=float32[B,3,32,32]"]


class Frozen(nn.Module):
    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(inplace=True),
            nn.Conv2d(2 * width, 4 * width, 3, padding=1, bias=False),
            nn.BatchNorm2d(4 * width),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.head = nn.Sequential(nn.Linear(4 * width, 64), nn.ReLU(), nn.Linear(64, classes))

    def forward(self, x: Tensor) -> Tensor:  # [B, 3, 32, 32]
        return self.head(self.trunk(x))


def model(width: int = 16, classes: int = 10) -> nn.Module:
    return Frozen(width, classes)


def sample(batch: int, seed: int) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    return (torch.randn(batch, 3, 32, 32, generator=generator(seed)),), {}


def member(i: int) -> nn.Module:
    module = trained(model, 1100, [sample(16, 11000)])
    head = trained(lambda: model().get_submodule("head"), 1101 + i)
    module.get_submodule("head").load_state_dict(head.state_dict())
    return module
