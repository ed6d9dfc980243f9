"""Checks the operands of the ops over int8 weights."""

from __future__ import annotations

import torch
from torch import Tensor

from .require import dense, of_shape, require

TAIL = 8
"""The bytes at the end of each row of an int8 weight: a factor and a summand, both float32."""


def _float32(name: str, x: Tensor, rank: int) -> Tensor:
    dense(name, x, rank)
    require(x.dtype is torch.float32, f"{name} is {x.dtype}; float32 is needed")
    require(x.device.type in ("cpu", "meta"), f"{name} is on {x.device}; the CPU is needed")
    return x


def int8_scales(weight: Tensor) -> None:
    """Checks `widepack.int8_scales`."""
    require(_float32("weight", weight, 3).shape[2] > 0, "weight has no inputs")


def int8_weight(weight: Tensor, scales: Tensor) -> None:
    """Checks `widepack.int8_weight`."""
    of_shape("scales", scales, _float32("weight", weight, 3).shape[:2], weight)


def int8_linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> None:
    """Checks `widepack.int8_linear`."""
    members, outputs = _float32("scales", scales, 2).shape
    inputs = _float32("x", x, 3).shape[2]
    require(x.shape[0] in (1, members), f"x is for {x.shape[0]} members; {members} are needed")
    of_shape("weight", weight, [members * inputs, outputs + TAIL])
    require(weight.dtype is torch.uint8, f"weight is {weight.dtype}; uint8 is needed")
    require(weight.device == x.device, f"weight is on {weight.device}; x is on {x.device}")
    require(weight.is_contiguous(), "weight has gaps in its memory")
    of_shape("bias", bias, [members, outputs], scales)
