"""Patterns of everyday code: dynamic dims."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from networks.patterns.case import Case, case, chain, linear, net, of, param
from networks.patterns.convolutions import I2
from networks.patterns.shapes import ROWS, TEXT


def even_length(self: Any, x: Tensor) -> Tensor:
    if x.shape[1] % 2:
        x = F.pad(x, (0, 0, 0, 1))
    return self.fc(x.view(x.shape[0], -1, 16))


CASES: dict[str, Case] = {
    "length": case(
        net(
            lambda self, x: self.b(self.a(x.transpose(1, 2)).transpose(1, 2)).relu(),
            a=of(nn.Conv1d, 8, 6, 3, padding=1),
            b=linear(6, 5),
        ),
        TEXT,
        T=(7, 1, 30),
    ),
    "image_size": case(
        chain(
            of(nn.Conv2d, 4, 6, 3, stride=2, padding=1),
            of(nn.BatchNorm2d, 6),
            of(nn.ReLU),
            of(nn.AdaptiveAvgPool2d, 1),
            of(nn.Flatten),
            linear(6, 5),
        ),
        I2,
        H=(9, 5, 2),
        W=(6, 11, 1),
    ),
    "image_multiple": case(
        net(
            lambda self, x: x + self.up(self.down(x)),
            down=of(nn.Conv2d, 4, 6, 4, stride=4),
            up=of(nn.ConvTranspose2d, 6, 4, 4, stride=4),
        ),
        "x=float32[B,4,4*H,4*W]",
        H=(3, 1, 2),
        W=(2, 4, 1),
    ),
    "batch_on_axis_1": case(net(lambda self, x: self.fc(x).mean(0), fc=linear(8, 5)), "x=float32[T,B,8]"),
    "batch_last": case(net(lambda self, x: self.w @ x, w=param(5, 6)), "x=float32[6,B]"),
    "no_batch": case(net(lambda self, x: self.fc(x).softmax(0), fc=linear(8, 5)), "x=float32[T,8]"),
    "no_dynamic_dim": case(
        net(lambda self, x: self.fc(x).sum() * self.fc(x), fc=linear(8, 5)), "x=float32[4,8]"
    ),
    "vector": case(net(lambda self, x: self.fc(x), fc=linear(8, 5)), "x=float32[8]"),
    "number": case(
        net(lambda self, x: torch.tanh(self.w * x + self.b), w=param(4), b=param(4)), "x=float32[]"
    ),
    "two_lengths": case(
        net(lambda self, x, y: self.q(x) @ self.k(y).mT / math.sqrt(5), q=linear(8, 5), k=linear(6, 5)),
        TEXT,
        "y=float32[B,S,6]",
        S=(3, 9, 1),
    ),
    "across_the_batch": case(
        net(lambda self, x: (self.fc(x) - self.fc(x).mean(0)) @ self.fc(x).t() / x.shape[0], fc=linear(6, 5)),
        ROWS,
    ),
    "sizes_as_numbers": case(
        net(
            lambda self, x: self.fc(x).sum(1) / x.shape[1] + x.size(0) * self.w + x.numel(),
            fc=linear(8, 5),
            w=param(),
        ),
        TEXT,
    ),
    "sizes_in_shapes": case(
        net(
            lambda self, x: (
                torch.ones(x.shape[0], x.shape[1] + 1, 1) * self.w
                + torch.arange(x.shape[1] + 1)[:, None] * self.fc(x).mean()
            ),
            fc=linear(8, 5),
            w=param(5),
        ),
        TEXT,
    ),
    "table_by_length": case(
        net(
            lambda self, x: self.fc(x) + self.positions[: x.shape[1]], fc=linear(8, 5), positions=param(16, 5)
        ),
        TEXT,
        "T=1..16",
        T=(7, 16, 1),
    ),
    "guard_even": case(net(even_length, fc=linear(16, 5)), TEXT, T=(8, 2, 30)),
    "half_length": case(
        net(
            lambda self, x: self.fc(x[:, : x.shape[1] // 2]) + self.fc(x[:, x.shape[1] // 2 :]),
            fc=linear(8, 5),
        ),
        "x=float32[B,2*T,8]",
    ),
    "stride_by_length": case(
        net(
            lambda self, x: (
                self.fc(x.reshape(x.shape[0] * x.shape[1], 8)).view(*x.shape[:2], 5).flatten(1).logsumexp(1)
            ),
            fc=linear(8, 5),
        ),
        TEXT,
    ),
}
