"""Residual networks (He et al. 2015): one block, ResNet-18, ResNet-50."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Module:
    """A convolution that changes the size only by its stride, and a norm."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(outputs)
    )


class Residual(nn.Module):
    """relu(branch(x) + shortcut(x)); the shortcut is a projection if the size or the channels change."""

    def __init__(self, branch: nn.Module, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.branch = branch
        self.shortcut = (
            conv(inputs, outputs, 1, stride) if stride != 1 or inputs != outputs else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:  # [B, C, H, W]
        return torch.relu(self.branch(x) + self.shortcut(x))


def basic(inputs: int, width: int, stride: int = 1) -> nn.Module:
    """Two 3x3 convolutions."""
    return Residual(
        nn.Sequential(conv(inputs, width, 3, stride), nn.ReLU(), conv(width, width, 3)), inputs, width, stride
    )


def bottleneck(inputs: int, width: int, stride: int = 1) -> nn.Module:
    """Three convolutions: 1x1, 3x3, and 1x1 with four times as many channels."""
    branch = nn.Sequential(
        conv(inputs, width, 1), nn.ReLU(), conv(width, width, 3, stride), nn.ReLU(), conv(width, 4 * width, 1)
    )
    return Residual(branch, inputs, 4 * width, stride)


class ResNet(nn.Module):
    """Stem, four stages, mean over the image, classifier. small: a 3x3 stem without pooling, for images of 32
    pixels.
    """

    def __init__(self, blocks: tuple[int, ...], deep: bool, width: int, classes: int, small: bool) -> None:
        super().__init__()
        stem = [conv(3, width, 3 if small else 7, 1 if small else 2), nn.ReLU()]
        self.stem = nn.Sequential(*stem, *([] if small else [nn.MaxPool2d(3, 2, 1)]))
        make, grown = (bottleneck, 4) if deep else (basic, 1)
        layers, channels = [], width
        for stage, count in enumerate(blocks):
            for i in range(count):
                layers.append(make(channels, width << stage, 2 if stage and not i else 1))
                channels = grown * (width << stage)
        self.stages = nn.Sequential(*layers)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:  # [B, 3, H, W]
        y: Tensor = self.head(self.stages(self.stem(x)).mean((2, 3)))
        return y  # [B, classes]


def block(channels: int = 64) -> nn.Module:
    """One basic block: [B, channels, H, W] -> the same."""
    return basic(channels, channels)


def resnet18(width: int = 64, classes: int = 1000, small: bool = False) -> nn.Module:
    return ResNet((2, 2, 2, 2), False, width, classes, small)


def resnet50(width: int = 64, classes: int = 1000, small: bool = False) -> nn.Module:
    return ResNet((3, 4, 6, 3), True, width, classes, small)
