"""Checks the operands of pools whose kernel trusts the size or the place of a window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .require import OperandError, dense, readable, require

_LARGEST = 2**31


def max_pool1d(
    self: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> None:
    """Checks `aten.max_pool1d`: a window reaches past the padded row by less than a stride."""
    length = dense("self", self, 2, 3).shape[-1]
    lists: tuple[Any, ...] = (kernel_size, stride, padding, dilation)
    given = [v for values in lists for v in (values if isinstance(values, (list, tuple)) else [values])]
    if any(not isinstance(v, torch.SymInt) and not 0 <= v <= _LARGEST for v in given):
        raise OperandError(f"{given} contains a number outside of 0 to {_LARGEST}")
    kernel, step, pad, gap = (_first(values, default) for values, default in zip(lists, (1, 0, 0, 1)))
    if gap * (kernel - 1) + 1 > length + 2 * pad + (step or kernel) - 1 and length:
        raise OperandError(f"a window of {kernel} with dilation {gap} does not fit into {length} + 2 * {pad}")


def fractional_max_pool(
    self: Tensor, kernel_size: Sequence[int], output_size: Sequence[int], random_samples: Tensor
) -> None:
    """Checks `aten.fractional_max_pool2d` and `3d`: numbers from 0 to 1 place the windows inside of a row."""
    dense("self", self)
    dense("random_samples", random_samples)
    given: list[Any] = list(kernel_size)
    if any(not isinstance(k, torch.SymInt) and k < 1 for k in given):
        raise OperandError(f"kernel_size is {given}; numbers from 1 are possible")
    if readable(random_samples):
        inside = (random_samples >= 0) & (random_samples <= 1)
        require(bool(inside.all()), "random_samples contains a number that is not from 0 to 1")


def _first(values: Any, default: int) -> Any:
    if isinstance(values, (list, tuple)):
        return values[0] if values else default
    return values
