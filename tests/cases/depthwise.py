"""A depthwise-separable CNN (MobileNet's block) with maxpool between the stages and adaptive pooling
to 2 x 2.
"""

from typing import Any

import torch
from torch import Tensor, nn

from . import generator, trained

N = 4
RECURRENT = False
INPUTS = ["x=float32[B,3,32,32]"]


def separable(inputs: int, outputs: int) -> list[nn.Module]:
    return [
        nn.Conv2d(inputs, inputs, 3, padding=1, groups=inputs, bias=False),
        nn.BatchNorm2d(inputs),
        nn.ReLU6(inplace=True),
        nn.Conv2d(inputs, outputs, 1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.Hardswish(inplace=True),
    ]


class Depthwise(nn.Module):
    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, width, 3, stride=1, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU6(inplace=True),
            *separable(width, 2 * width),
            nn.MaxPool2d(2),
            *separable(2 * width, 2 * width),
            *separable(2 * width, 4 * width),
            nn.MaxPool2d(2),
            *separable(4 * width, 4 * width),
        )
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.classifier = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(4 * width * 4, classes))

    def forward(self, x: Tensor) -> Tensor:  # [B, 3, 32, 32]
        return self.classifier(self.pool(self.features(x)))


def model(width: int = 16, classes: int = 10) -> nn.Module:
    return Depthwise(width, classes)


def sample(batch: int, seed: int) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    return (torch.randn(batch, 3, 32, 32, generator=generator(seed)),), {}


def member(i: int) -> nn.Module:
    return trained(model, 300 + i, [sample(16, 3000 + i)])
