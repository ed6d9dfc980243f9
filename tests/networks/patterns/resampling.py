"""Patterns of everyday code: resampling, pooling, padding."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from networks.patterns.case import Case, case, chain, linear, net, of
from networks.patterns.convolutions import I2
from networks.patterns.shapes import IMAGE


def unpooled(self: Any, x: Tensor) -> Tensor:
    y, at = F.max_pool2d(self.conv(x), 2, return_indices=True)
    return F.max_unpool2d(y * 2, at, [2, 2])


def upsampled(self: Any, x: Tensor) -> list[Tensor]:
    y = self.conv(x)
    return [
        F.interpolate(y, scale_factor=2),
        F.interpolate(y, size=(5, 7), mode="bilinear", align_corners=True),
        F.interpolate(y, scale_factor=1.5, mode="bilinear", align_corners=False),
        F.interpolate(y, size=(5, 7), mode="bicubic"),
        F.interpolate(y, size=(3, 2), mode="area"),
        F.interpolate(y, size=(3, 2), mode="bilinear", antialias=True),
        F.interpolate(y, scale_factor=(2, 3), mode="nearest-exact"),
        F.interpolate(y, size=y.shape[2:], mode="nearest"),
    ]


def upsampled_others(self: Any, x: Tensor) -> list[Tensor]:
    y = self.conv(x)
    return [
        F.interpolate(y.flatten(2), size=9, mode="linear"),
        F.interpolate(y.flatten(2), scale_factor=2.0, mode="nearest"),
        F.interpolate(y.unsqueeze(2), scale_factor=2.0, mode="trilinear"),
        F.interpolate(y.unsqueeze(2), size=(2, 5, 7), mode="nearest"),
        F.interpolate(y.flatten(2), size=9, mode="nearest-exact"),
    ]


def pooled(self: Any, x: Tensor) -> list[Tensor]:
    y = self.conv(x)
    return [
        F.max_pool2d(y, 2),
        F.max_pool2d(y, 3, stride=2, padding=1, ceil_mode=True),
        F.avg_pool2d(y, 3, stride=2, padding=1, count_include_pad=False),
        F.adaptive_avg_pool2d(y, 1).flatten(1),
        F.adaptive_avg_pool2d(y, (3, 2)),
        F.adaptive_max_pool2d(y, 2),
        F.lp_pool2d(y, 2, 2),
        F.max_pool1d(y.flatten(2), 3, stride=2),
        F.avg_pool1d(y.flatten(2), 2),
        F.adaptive_avg_pool1d(y.flatten(2), 4),
        F.adaptive_max_pool1d(y.flatten(2), 4),
        F.max_pool3d(y.unsqueeze(2), (1, 2, 2)),
        F.adaptive_avg_pool3d(y.unsqueeze(2), 1),
    ]


def padded(self: Any, x: Tensor) -> list[Tensor]:
    y = self.conv(x)
    return [
        F.pad(y, (1, 2)),
        F.pad(y, (1, 0, 2, 1), value=0.5),
        F.pad(y, (1, 1, 1, 1), mode="reflect"),
        F.pad(y, (2, 1, 0, 1), mode="replicate"),
        F.pad(y, (1, 1, 1, 1), mode="circular"),
        F.pad(y, (0, 0, 0, 0, 1, 0)),
        F.pad(y, (-1, -1)),
        F.pad(y.flatten(2), (1, 1), mode="reflect"),
    ]


def warped(mode: str, padding: str, corners: bool) -> Case:
    def forward(self: Any, x: Tensor, grid: Tensor) -> Tensor:
        return F.grid_sample(self.conv(x), grid, mode=mode, padding_mode=padding, align_corners=corners)

    return case(net(forward, conv=of(nn.Conv2d, 4, 5, 3, padding=1)), IMAGE, "grid=float32[B,H,W,2]")


def spatial_transformer(self: Any, x: Tensor) -> Tensor:
    theta = self.locate(x.mean((2, 3))).view(-1, 2, 3)
    return F.grid_sample(
        self.conv(x), F.affine_grid(theta, [x.shape[0], 5, 7, 6], align_corners=False), align_corners=False
    )


CASES: dict[str, Case] = {
    "interpolate": case(net(upsampled, conv=of(nn.Conv2d, 4, 5, 3, padding=1)), IMAGE),
    "interpolate_others": case(net(upsampled_others, conv=of(nn.Conv2d, 4, 5, 3, padding=1)), IMAGE),
    "interpolate_like": case(
        net(
            lambda self, x, y: self.a(y) + F.interpolate(self.b(x), size=y.shape[-2:], mode="bilinear"),
            a=of(nn.Conv2d, 4, 5, 1),
            b=of(nn.Conv2d, 4, 5, 1),
        ),
        "x=float32[B,4,H,W]",
        "y=float32[B,4,2*H,2*W]",
    ),
    "upsample": case(
        chain(
            of(nn.Conv2d, 4, 5, 1),
            of(nn.Upsample, scale_factor=2, mode="bilinear", align_corners=True),
            of(nn.Conv2d, 5, 4, 3),
        ),
        I2,
    ),
    "pixel_shuffle": case(
        chain(of(nn.Conv2d, 4, 8, 3, padding=1), of(nn.PixelShuffle, 2), of(nn.Conv2d, 2, 5, 1)), I2
    ),
    "pixel_unshuffle": case(
        chain(of(nn.Conv2d, 4, 5, 1), of(nn.PixelUnshuffle, 2)), "input=float32[B,4,2*H,2*W]"
    ),
    "channel_shuffle": case(
        chain(of(nn.Conv2d, 4, 6, 1, groups=2), of(nn.ChannelShuffle, 2), of(nn.Conv2d, 6, 4, 1, groups=2)),
        I2,
    ),
    "grid_sample": warped("bilinear", "zeros", False),
    "grid_sample_nearest": warped("nearest", "border", True),
    "grid_sample_bicubic": warped("bicubic", "reflection", False),
    "spatial_transformer": case(
        net(spatial_transformer, conv=of(nn.Conv2d, 4, 5, 3, padding=1), locate=linear(4, 6)), IMAGE
    ),
    "pools": case(net(pooled, conv=of(nn.Conv2d, 4, 5, 3, padding=1)), "x=float32[B,4,8,8]"),
    "fractional_pool": case(
        net(
            lambda self, x: self.pool(self.conv(x)).flatten(1),
            conv=of(nn.Conv2d, 4, 5, 3, padding=1),
            pool=lambda: nn.FractionalMaxPool2d(2, output_size=3, _random_samples=torch.rand(8, 5, 2)),
        ),
        "x=float32[B,4,8,7]",
    ),
    "fractional_pool_3d": case(
        net(
            lambda self, x, at: F.fractional_max_pool3d(
                self.conv(x), 2, output_size=(2, 3, 3), return_indices=True, _random_samples=at.sigmoid()
            ),
            conv=of(nn.Conv3d, 2, 3, 1),
        ),
        "x=float32[3,2,5,6,6]",  # torch.export fixes the batch
        "at=float32[3,3,3]",
    ),
    "max_unpool": case(net(unpooled, conv=of(nn.Conv2d, 4, 5, 3, padding=1)), "x=float32[B,4,8,8]"),
    "pads": case(net(padded, conv=of(nn.Conv2d, 4, 5, 3, padding=1)), "x=float32[B,4,6,8]"),
    "unfold_fold": case(
        net(
            lambda self, x: F.fold(self.fc(F.unfold(self.conv(x), 2, stride=2).mT).mT, (8, 6), 2, stride=2),
            conv=of(nn.Conv2d, 4, 5, 1),
            fc=linear(20, 8),
        ),
        IMAGE,
    ),
    "patches": case(
        net(
            lambda self, x: self.fc(
                x.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
            ),
            fc=linear(16, 5),
        ),
        "x=float32[B,4,2*H,2*W]",
    ),
}
