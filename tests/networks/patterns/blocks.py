"""Patterns of everyday code: blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from networks.patterns.case import Case, case, linear, net, param
from networks.patterns.shapes import ROWS, TEXT


def no_grad_block(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = self.teacher(x).detach()
    return self.student(x) - target


def autocast_block(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    y = self.a(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = self.b(y.relu())
        with torch.autocast("cpu", enabled=False):
            y = y + self.a(x)
    return y, z


def checked(self: Any, x: Tensor) -> Tensor:
    torch._check(x.shape[1] > 1)
    assert x.shape[-1] == 8, x.shape
    if x.dim() != 3:
        raise ValueError(x.shape)
    return torch.utils.checkpoint.checkpoint(self.fc, x, use_reentrant=False)


def float_island(self: Any, x: Tensor) -> Tensor:
    y = self.fc(x)
    return (y.float() * torch.rsqrt(y.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(y.dtype) * self.g


CASES: dict[str, Case] = {
    "no_grad_block": case(net(no_grad_block, teacher=linear(6, 5), student=linear(6, 5)), ROWS),
    "autocast_block": case(net(autocast_block, a=linear(6, 5), b=linear(5, 4)), ROWS),
    "decorated": case(net(torch.no_grad()(lambda self, x: self.fc(x).detach()), fc=linear(6, 5)), ROWS),
    "checked": case(net(checked, fc=linear(8, 5)), TEXT),
    "float_island": case(net(float_island, fc=linear(8, 8), g=param(8)), TEXT),
}
