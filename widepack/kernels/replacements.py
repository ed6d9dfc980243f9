"""Replaces ops that end the process, or leave their values, on operands that a program may have.

A replacement returns what the op returns, and has the op's parameters. It decides nothing by values, so that
it can be traced: compiled programs contain it too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)


def reshape_alias(x: Tensor, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Computes `aten._reshape_alias`, which checks nothing, by an op that refuses memory outside x."""
    return torch.as_strided(x, size, stride)


def as_strided(
    x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Tensor:
    """Computes `aten.as_strided` over the value alone, which may be a part of one for all members."""
    return torch.as_strided(x.clone(memory_format=torch.contiguous_format), size, stride, storage_offset)


def as_strided_scatter(
    x: Tensor, src: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Tensor:
    """Computes `aten.as_strided_scatter` over the value alone."""
    return torch.as_strided_scatter(
        x.clone(memory_format=torch.contiguous_format), src, size, stride, storage_offset
    )


def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Computes `aten._stack`, which does not check its tensors, by the op that checks them."""
    return torch.stack(list(tensors), dim)


def divide(self: Any, other: Any, *, rounding_mode: str | None = None) -> Tensor:
    """Computes `aten.div.Tensor_mode`. The processor stops at the least integer divided by -1.

    torch rounds with `trunc` by the instruction of the processor. Here -1 is divided by as a negation, which
    gives the least integer again, as `floor` does.
    """
    dtype = torch.result_type(self, other)
    if rounding_mode != "trunc" or dtype not in _SIGNED:
        return torch.div(self, other, rounding_mode=rounding_mode)
    if not isinstance(other, Tensor):
        other = torch.scalar_tensor(other, dtype=dtype, device=self.device)
    negative = other == -1
    quotient = torch.div(self, torch.where(negative, 1, other), rounding_mode="trunc")
    return torch.where(negative, -self.to(dtype), quotient)


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    """Computes `aten._weight_norm_interface`, whose kernel reads dense memory whatever the strides are."""
    op = torch.ops.aten._weight_norm_interface.default
    w, norms = op(v.contiguous(), g.contiguous(), dim)
    return w, norms


REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "aten._reshape_alias.default": reshape_alias,
    "aten._stack.default": stack,
    "aten.as_strided.default": as_strided,
    "aten.as_strided_scatter.default": as_strided_scatter,
    "aten._weight_norm_interface.default": weight_norm,
    "aten.div.Scalar_mode": divide,
    "aten.div.Tensor_mode": divide,
}
"""The replacement of each op by its name in programs."""
