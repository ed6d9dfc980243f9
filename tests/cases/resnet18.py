"""The architecture of ResNet-18 (He et al. 2015) at width 16: a 7 x 7 stem and a maxpool, four stages of two
basic blocks, BatchNorm, global average pooling.
"""

from typing import Any

import torch
from torch import Tensor, nn

from . import generator, trained

N = 3
RECURRENT = False
INPUTS = ["x=float32[B,3,64,64]"]


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)


class ResNet(nn.Module):
    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        stages, inputs = [], width
        for outputs, stride in [(width, 1), (2 * width, 2), (4 * width, 2), (8 * width, 2)]:
            stages.append(nn.Sequential(Block(inputs, outputs, stride), Block(outputs, outputs, 1)))
            inputs = outputs
        self.layers = nn.Sequential(*stages)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:  # [B, 3, 64, 64]
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))  # [B, W, 16, 16]
        x = self.avgpool(self.layers(x))  # [B, 8 W, 1, 1]
        return self.fc(torch.flatten(x, 1))


def model(width: int = 16, classes: int = 10) -> nn.Module:
    return ResNet(width, classes)


def sample(batch: int, seed: int) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    return (torch.randn(batch, 3, 64, 64, generator=generator(seed)),), {}


def member(i: int) -> nn.Module:
    return trained(model, 200 + i, [sample(16, 2000 + i)])
