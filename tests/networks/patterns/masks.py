"""Patterns of everyday code: masks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from networks.patterns.case import Case, case, linear, net, of, param
from networks.patterns.shapes import ROWS, TEXT


def masked_mean(self: Any, x: Tensor, mask: Tensor) -> Tensor:
    keep = (~mask).unsqueeze(-1).float()
    return (self.fc(x) * keep).sum(1) / keep.sum(1).clamp(min=1)


def assigned(self: Any, x: Tensor, mask: Tensor) -> Tensor:
    y = self.fc(x)
    y[mask] = self.fill
    y[:, 0] = 0.5
    return y


def assigned_by_value(self: Any, x: Tensor) -> Tensor:
    y = self.fc(x)
    y[y < 0] = 0.0
    y[x > 1] *= 2
    return y


CASES: dict[str, Case] = {
    "bool_mask": case(
        net(
            lambda self, x, mask: self.fc(x).masked_fill(mask.unsqueeze(-1), -1e9).softmax(1), fc=linear(8, 5)
        ),
        TEXT,
        "mask=bool[B,T]",
    ),
    "float_mask": case(
        net(lambda self, x, mask: (self.fc(x) + mask[..., None] * -1e4).softmax(1), fc=linear(8, 5)),
        TEXT,
        "mask=float32[B,T]",
    ),
    "inf_mask": case(
        net(
            lambda self, x, mask: self.fc(x).masked_fill(mask[..., None], float("-inf")).amax(1),
            fc=linear(8, 5),
        ),
        TEXT,
        "mask=bool[B,T]",
    ),
    "masked_mean": case(net(masked_mean, fc=linear(8, 5)), TEXT, "mask=bool[B,T]"),
    "mask_from_ids": case(
        net(
            lambda self, ids: (self.table(ids) * (ids != 0).unsqueeze(-1)).sum(1),
            table=of(nn.Embedding, 9, 4),
        ),
        "ids=int64[B,T]:0..8",
    ),
    "mask_from_lengths": case(
        net(
            lambda self, x, lengths: (
                self.fc(x)
                .masked_fill((torch.arange(x.shape[1])[None] >= lengths[:, None])[..., None], 0)
                .sum(1)
            ),
            fc=linear(8, 5),
        ),
        TEXT,
        "lengths=int64[B]:1..4",
    ),
    "mask_assigned": case(net(assigned, fc=linear(8, 5), fill=param(5)), TEXT, "mask=bool[B,T]"),
    "mask_from_values_assigned": case(net(assigned_by_value, fc=linear(6, 6)), ROWS),
    "masked_scatter": case(
        net(
            lambda self, x, mask: self.fc(x).masked_scatter(mask[..., None], self.fc(x).exp()),
            fc=linear(8, 5),
        ),
        TEXT,
        "mask=bool[B,T]",
    ),
    "mask_token": case(
        net(
            lambda self, x, mask: self.fc(torch.where(mask[..., None], self.token, x)),
            fc=linear(8, 5),
            token=param(8),
        ),
        TEXT,
        "mask=bool[B,T]",
    ),
    "causal_buffer": case(
        net(
            lambda self, x: (
                (self.q(x) @ self.q(x).mT)
                .masked_fill(self.causal[: x.shape[1], : x.shape[1]], float("-inf"))
                .softmax(-1)
                @ x
            ),
            q=linear(8, 8),
            causal=lambda: torch.ones(16, 16, dtype=torch.bool).triu(1),
        ),
        TEXT,
        "T=1..16",
        T=(7, 12, 2),
    ),
}
