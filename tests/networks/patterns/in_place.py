"""Patterns of everyday code: in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from networks.patterns.case import Case, case, chain, linear, net, of, param
from networks.patterns.shapes import FLAT, ROWS


def in_place_slices(self: Any, x: Tensor) -> Tensor:
    y = self.fc(x)
    y[:, 0] = x[:, 0, :5]
    y[:, 1:] *= 2
    y[..., -1] += self.w
    y[:, ::2].clamp_(max=1.0)
    return y


def in_place_views(self: Any, x: Tensor) -> Tensor:
    y = self.fc(x)
    y.view(x.shape[0], -1)[:, :4].relu_()
    y.add_(1).mul_(self.w).masked_fill_(y > 2, -1.0)
    y.select(1, 1).zero_()
    y.transpose(1, 2)[:, 0].fill_(0.5)
    return y


def in_place_rows(self: Any, x: Tensor) -> Tensor:
    out = torch.zeros(x.shape[0], 4, 5)
    for i in range(4):
        out[:, i] = self.fc(x[:, i])
    out.index_add_(1, torch.tensor([0, 2]), out[:, 1:3].clone())
    out.index_fill_(1, torch.tensor([3]), 0.25)
    return out.index_copy_(1, torch.tensor([1, 0]), out[:, 2:4] * self.w)


def in_place_dropout(self: Any, x: Tensor) -> Tensor:
    y = self.fc(x)
    z = self.drop(y)
    z.mul_(2)
    return y + z


def in_place_put(self: Any, x: Tensor, rows: Tensor) -> Tensor:
    y = self.fc(x).clone()
    y[torch.arange(x.shape[0]), rows] = self.w
    y[:, [0, 2], [1, 3]] = 0.0
    y[:, :, [0, 1]] = y[:, :, [3, 4]] * 2
    return y.index_put((rows,), self.w, accumulate=True) if x.shape[0] > 4 else y


CASES: dict[str, Case] = {
    "in_place_relu": case(
        chain(
            linear(6, 5),
            of(nn.ReLU, inplace=True),
            linear(5, 4),
            of(nn.SiLU, inplace=True),
            of(nn.Hardtanh, inplace=True),
        ),
        "input=float32[B,6]",
    ),
    "in_place_add": case(
        net(
            lambda self, x: self.fc(x).add_(self.w).sigmoid_().mul_(x[:, :5]).neg_(),
            fc=linear(6, 5),
            w=param(5),
        ),
        ROWS,
    ),
    "in_place_slices": case(net(in_place_slices, fc=linear(6, 5), w=param(4)), FLAT),
    "in_place_views": case(net(in_place_views, fc=linear(6, 5), w=param(5)), FLAT),
    "in_place_rows": case(net(in_place_rows, fc=linear(6, 5), w=param(5)), FLAT),
    "in_place_dropout": case(net(in_place_dropout, fc=linear(6, 5), drop=of(nn.Dropout, 0.5)), ROWS),
    "in_place_put": case(
        net(in_place_put, fc=linear(6, 5), w=param(5)), FLAT, "rows=int64[B]:0..3", B=(4, 1, 2)
    ),
    "copy_into": case(
        net(
            lambda self, x: (
                torch.empty(x.shape[0], 5).copy_(self.fc(x)) + torch.full_like(x[:, :5], 2).fill_(self.w)
            ),
            fc=linear(6, 5),
            w=param(),
        ),
        ROWS,
    ),
}
