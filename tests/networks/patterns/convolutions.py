"""Patterns of everyday code: convolutions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from networks.patterns.case import Case, Make, case, chain, linear, net, of
from networks.patterns.shapes import IMAGE


def standardized(self: Any, x: Tensor) -> Tensor:
    w = self.conv.weight
    w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
    return F.conv2d(x, w, self.conv.bias, padding=1)


def conv(d: int, *args: Any, **kwargs: Any) -> Make:
    return chain(of([nn.Conv1d, nn.Conv2d, nn.Conv3d][d - 1], *args, **kwargs))


def transposed(d: int, *args: Any, **kwargs: Any) -> Make:
    return chain(of([nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d][d - 1], *args, **kwargs))


I1, I2, I3 = "input=float32[B,4,T]", "input=float32[B,4,H,W]", "input=float32[B,4,5,6,5]"


CASES: dict[str, Case] = {
    "conv1d": case(conv(1, 4, 6, 3, padding=1), I1),
    "conv2d": case(conv(2, 4, 6, 3, stride=2), I2),
    "conv3d": case(conv(3, 4, 6, 3), I3),
    "conv_grouped": case(
        chain(of(nn.Conv2d, 4, 8, 3, groups=2), of(nn.Conv2d, 8, 8, 1, groups=4, bias=False)), I2
    ),
    "conv_depthwise": case(chain(of(nn.Conv2d, 4, 8, 3, groups=4, padding=1), of(nn.Conv2d, 8, 6, 1)), I2),
    "conv1d_depthwise_causal": case(
        net(lambda self, x: self.conv(F.pad(x, (2, 0))), conv=of(nn.Conv1d, 4, 4, 3, groups=4)),
        "x=float32[B,4,T]",
    ),
    "conv_dilated": case(conv(2, 4, 6, 3, dilation=2, padding=2), I2),
    "conv_same": case(
        chain(of(nn.Conv2d, 4, 6, 3, padding="same"), of(nn.Conv2d, 6, 6, (2, 4), padding="same", groups=2)),
        I2,
    ),
    "conv_reflect": case(conv(2, 4, 6, 3, padding=1, padding_mode="reflect"), I2),
    "conv_replicate": case(
        chain(
            of(nn.Conv1d, 4, 6, 3, padding=1, padding_mode="replicate"),
            of(nn.Conv1d, 6, 4, 3, padding=1, padding_mode="zeros"),
        ),
        I1,
    ),
    "conv_circular": case(
        chain(
            of(nn.Conv2d, 4, 6, 3, padding=2, padding_mode="circular"),
            of(nn.Conv2d, 6, 6, 3, padding=1, padding_mode="circular", groups=6),
        ),
        I2,
    ),
    "conv_circular_3d": case(conv(3, 4, 6, 3, padding=1, padding_mode="circular"), I3),
    "conv_transposed1d": case(transposed(1, 4, 6, 3, stride=2), I1),
    "conv_transposed2d": case(
        chain(
            of(nn.ConvTranspose2d, 4, 6, 3, stride=2, padding=1, output_padding=1),
            of(nn.ConvTranspose2d, 6, 4, 2, groups=2),
        ),
        I2,
    ),
    "conv_transposed3d": case(transposed(3, 4, 6, 2, stride=2, dilation=2), I3),
    "conv_transposed_size": case(
        net(
            lambda self, x: self.up(x, output_size=[16, 12]),
            up=of(nn.ConvTranspose2d, 4, 6, 3, stride=2, padding=1),
        ),
        IMAGE,
    ),
    "conv_unbatched": case(conv(2, 4, 6, 3), "input=float32[4,H,W]"),
    "conv_standardized": case(net(standardized, conv=of(nn.Conv2d, 4, 6, 3)), IMAGE),
    "conv_fixed_kernel": case(
        net(
            lambda self, x: self.conv(F.conv2d(x, self.blur.expand(4, 1, 3, 3), groups=4, padding=1)),
            conv=of(nn.Conv2d, 4, 5, 1),
            blur=lambda: torch.ones(1, 1, 3, 3) / 9,
        ),
        IMAGE,
    ),
    "conv_frozen_stem": case(
        net(lambda self, x: self.conv(F.conv2d(x, torch.ones(4, 4, 3, 3))), conv=of(nn.Conv2d, 4, 5, 1)),
        IMAGE,
    ),
    "conv_of_own_kernels": case(
        net(
            lambda self, x, z: F.conv2d(
                x.flatten(0, 1)[None], self.make(z).view(-1, 1, 3, 3), groups=x.shape[0] * 4
            )[0].unflatten(0, (-1, 4)),
            make=linear(6, 36),
        ),
        IMAGE,
        "z=float32[B,6]",
    ),
    "conv_bn_relu_pool": case(
        chain(of(nn.Conv2d, 4, 6, 3, bias=False), of(nn.BatchNorm2d, 6), of(nn.ReLU), of(nn.MaxPool2d, 2)), I2
    ),
    "separable_block": case(
        chain(
            of(nn.Conv2d, 4, 4, 3, padding=1, groups=4),
            of(nn.BatchNorm2d, 4),
            of(nn.ReLU6),
            of(nn.Conv2d, 4, 6, 1),
            of(nn.BatchNorm2d, 6),
            of(nn.Hardswish),
        ),
        I2,
    ),
    "text_cnn": case(
        net(
            lambda self, ids: torch.cat(
                [F.relu(c(self.e(ids).transpose(1, 2))).amax(2) for c in self.convs], 1
            ),
            e=of(nn.Embedding, 9, 4),
            convs=lambda: nn.ModuleList(nn.Conv1d(4, 5, k) for k in (2, 3)),
        ),
        "ids=int64[B,T]:0..8",
    ),
    "convnext_block": case(
        net(
            lambda self, x: (
                x + self.b(F.gelu(self.a(self.norm(self.dw(x).permute(0, 2, 3, 1))))).permute(0, 3, 1, 2)
            ),
            dw=of(nn.Conv2d, 4, 4, 7, padding=3, groups=4),
            norm=of(nn.LayerNorm, 4),
            a=linear(4, 8),
            b=linear(8, 4),
        ),
        IMAGE,
    ),
}
