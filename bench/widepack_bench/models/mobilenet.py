"""MobileNetV3 (Howard et al. 2019): inverted residuals with depthwise convolutions and squeeze-excitation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# Of the large network: kernel, expanded channels, channels, squeeze-excitation, hardswish, stride.
LARGE = (
    (3, 16, 16, False, False, 1),
    (3, 64, 24, False, False, 2),
    (3, 72, 24, False, False, 1),
    (5, 72, 40, True, False, 2),
    (5, 120, 40, True, False, 1),
    (5, 120, 40, True, False, 1),
    (3, 240, 80, False, True, 2),
    (3, 200, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 480, 112, True, True, 1),
    (3, 672, 112, True, True, 1),
    (5, 672, 160, True, True, 2),
    (5, 960, 160, True, True, 1),
    (5, 960, 160, True, True, 1),
)


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """A convolution that changes the size only by its stride, and a norm."""
    return [
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs, eps=1e-3),
    ]


class SqueezeExcitation(nn.Module):
    """Scales the channels by a small network of their means."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        hidden = -(-channels // 4 // 8) * 8
        self.down, self.up = nn.Conv2d(channels, hidden, 1), nn.Conv2d(hidden, channels, 1)

    def forward(self, x: Tensor) -> Tensor:  # [B, C, H, W]
        scale = self.up(torch.relu(self.down(x.mean((2, 3), keepdim=True))))
        return x * nn.functional.hardsigmoid(scale)


class InvertedResidual(nn.Module):
    """Expands, convolves each channel, projects; residual if neither the size nor the channels change."""

    def __init__(
        self, inputs: int, kernel: int, expanded: int, outputs: int, squeeze: bool, swish: bool, stride: int
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        if expanded != inputs:
            layers += [*_conv(inputs, expanded, 1), nn.Hardswish() if swish else nn.ReLU()]
        layers += [
            *_conv(expanded, expanded, kernel, stride, expanded),
            nn.Hardswish() if swish else nn.ReLU(),
        ]
        layers += [SqueezeExcitation(expanded)] if squeeze else []
        self.layers = nn.Sequential(*layers, *_conv(expanded, outputs, 1))
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:  # [B, C, H, W]
        y: Tensor = self.layers(x)
        return x + y if self.residual else y


def mobilenetv3(classes: int = 1000) -> nn.Module:
    """MobileNetV3-Large: [B, 3, H, W] -> [B, classes]."""
    layers: list[nn.Module] = [*_conv(3, 16, 3, 2), nn.Hardswish()]
    inputs = 16
    for kernel, expanded, outputs, squeeze, swish, stride in LARGE:
        layers.append(InvertedResidual(inputs, kernel, expanded, outputs, squeeze, swish, stride))
        inputs = outputs
    layers += [*_conv(inputs, 960, 1), nn.Hardswish(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(960, 1280), nn.Hardswish(), nn.Linear(1280, classes))
