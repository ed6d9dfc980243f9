"""Convolutional networks without residuals: a U-Net (Ronneberger et al. 2015), a small net over images, a 1-D
CNN over signals.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def double(inputs: int, outputs: int) -> nn.Module:
    """Two 3x3 convolutions with norms."""
    layers: list[nn.Module] = []
    for i in range(2):
        layers += [
            nn.Conv2d(outputs if i else inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """A U-Net with four levels and skip connections. Image sizes are multiples of 8."""

    def __init__(self, inputs: int, width: int, classes: int) -> None:
        super().__init__()
        widths = [width << level for level in range(4)]
        self.down = nn.ModuleList(
            [double(inputs if not i else widths[i - 1], w) for i, w in enumerate(widths)]
        )
        self.grow = nn.ModuleList([nn.ConvTranspose2d(widths[i + 1], widths[i], 2, 2) for i in range(3)])
        self.up = nn.ModuleList([double(2 * widths[i], widths[i]) for i in range(3)])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:  # [B, inputs, H, W]
        across = []
        for i, layer in enumerate(self.down):
            x = layer(torch.max_pool2d(x, 2) if i else x)
            across.append(x)
        for i in (2, 1, 0):
            x = self.up[i](torch.cat([self.grow[i](x), across[i]], 1))
        y: Tensor = self.head(x)
        return y  # [B, classes, H, W]


def unet(inputs: int = 3, width: int = 64, classes: int = 2) -> nn.Module:
    return UNet(inputs, width, classes)


def small(inputs: int = 3, width: int = 32, classes: int = 10) -> nn.Module:
    """Three convolutions with norms, each followed by pooling, as in tutorials: [B, inputs, H, W] ->
    [B, classes].
    """
    layers: list[nn.Module] = []
    for i in range(3):
        channels = width << min(i, 1)
        layers += [
            nn.Conv2d(inputs if not i else width << min(i - 1, 1), channels, 3, padding=1),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, classes))


def signal(inputs: int = 8, width: int = 64, classes: int = 10) -> nn.Module:
    """A 1-D CNN: [B, inputs, T] -> [B, classes]."""
    layers: list[nn.Module] = []
    for i in range(3):
        channels = width << min(i, 1)
        layers += [
            nn.Conv1d(inputs if not i else width << min(i - 1, 1), channels, 5, stride=2, padding=2),
            nn.BatchNorm1d(channels),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(2 * width, classes))
