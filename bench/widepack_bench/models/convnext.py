"""ConvNeXt (Liu et al. 2022): blocks of a 7x7 depthwise convolution and a two-layer perceptron."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm


class ChannelNorm(nn.LayerNorm):
    """A layer norm over the channels of an image, [B, C, H, W]."""

    def forward(self, x: Tensor) -> Tensor:
        y = layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return y.permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    """x + scale * down(gelu(up(norm(depthwise(x)))))."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.scale = nn.Parameter(torch.full((dim,), 0.1))

    def forward(self, x: Tensor) -> Tensor:  # [B, dim, H, W]
        y: Tensor = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.down(gelu(self.up(y)))
        return x + y.permute(0, 3, 1, 2)


def convnext_atto(
    dims: tuple[int, ...] = (40, 80, 160, 320), depths: tuple[int, ...] = (2, 2, 6, 2), classes: int = 1000
) -> nn.Module:
    """ConvNeXt-atto: [B, 3, H, W] -> [B, classes]."""
    layers: list[nn.Module] = [nn.Conv2d(3, dims[0], 4, 4), ChannelNorm(dims[0], eps=1e-6)]
    for stage, (dim, depth) in enumerate(zip(dims, depths, strict=True)):
        if stage:
            layers += [ChannelNorm(dims[stage - 1], eps=1e-6), nn.Conv2d(dims[stage - 1], dim, 2, 2)]
        layers += [ConvNeXtBlock(dim) for _ in range(depth)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(dims[-1], eps=1e-6)]
    return nn.Sequential(*layers, *head, nn.Linear(dims[-1], classes))
