"""Checks the operands of widepack's own ops of experts."""

from __future__ import annotations

import torch
from torch import Tensor

from .require import dense, integers, of_shape, require


def expert_linear(x: Tensor, weight: Tensor, index: Tensor, few: bool = False) -> None:
    """Checks `widepack.expert_linear`. The op itself checks the numbers of the experts."""
    members, experts, _, inputs = dense("weight", weight, 4).shape
    require(weight.is_floating_point(), f"weight is {weight.dtype}; a float is needed")
    require(experts > 0, "weight has no experts")
    rows = dense("x", x, 3).shape[1]
    of_shape("x", x, [members, rows, inputs], weight)
    of_shape("index", integers("index", index, 2), [members, rows])
    require(index.device == weight.device, f"index is on {index.device}; weight is on {weight.device}")


def grouped_experts(x: Tensor, weight: Tensor, index: Tensor) -> None:
    """Checks `widepack.grouped_experts`. The op itself checks the numbers of the experts."""
    members, experts, inputs, outputs = dense("weight", weight, 4).shape
    require(weight.dtype is torch.bfloat16, f"weight is {weight.dtype}; bfloat16 is needed")
    require(experts > 0, "weight has no experts")
    require(inputs > 0 and outputs > 0, f"weight is {list(weight.shape)}; no size may be 0")
    require(inputs % 8 == 0 and outputs % 8 == 0, f"{inputs} and {outputs} are not multiples of 8")
    rows = dense("x", x, 3).shape[1]
    of_shape("x", x, [members, rows, inputs], weight)
    of_shape("index", integers("index", index, 2), [members, rows])
    require(index.device == weight.device, f"index is on {index.device}; weight is on {weight.device}")


def expert_mm(x: Tensor, weight: Tensor, index: Tensor, few: bool = False) -> None:
    """Checks `widepack.expert_mm`. The op itself checks the numbers of the experts."""
    experts, inputs, _ = dense("weight", weight, 3).shape
    require(weight.is_floating_point(), f"weight is {weight.dtype}; a float is needed")
    require(experts > 0, "weight has no experts")
    rows = dense("x", x, 2).shape[0]
    of_shape("x", x, [rows, inputs], weight)
    of_shape("index", integers("index", index, 1), [rows])
    require(index.device == weight.device, f"index is on {index.device}; weight is on {weight.device}")
