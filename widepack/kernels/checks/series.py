"""Checks the operands of ops whose number of steps is a value or a number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .require import OperandError, between, dense, integers, readable, require

_LEAST = -256.0
_MOST_ORDERS = 100
_MOST_ROUNDS = 2**14
_MOST_REPEATS = 2**40


def zeta(self: Any, other: Any) -> None:
    """Checks `aten.special_zeta`, whose series begins at its second operand and counts up to 9."""
    _start("other", other)


def polygamma(n: int, self: Tensor) -> None:
    """Checks `aten.polygamma`, which is a zeta function from order 2."""
    if not isinstance(n, int) or n not in (0, 1):
        _start("self", self)


def _start(name: str, x: Any) -> None:
    dense(name, x)
    if x.dtype not in (torch.float32, torch.float64) or not x.numel() or not readable(x):
        return
    least = float(torch.where(x == x.floor(), 0.0, x).min())  # whole numbers and NaN have no series
    if least < _LEAST:
        raise OperandError(f"{name} contains {least:g}; numbers below {_LEAST:g} must be whole")


def differences(
    self: Tensor,
    n: int = 1,
    dim: int = -1,
    prepend: Tensor | None = None,
    append: Tensor | None = None,
) -> None:
    """Checks `aten.diff`, which computes differences n times."""
    if isinstance(n, int) and n > _MOST_ORDERS:
        raise OperandError(f"n is {n}; numbers up to {_MOST_ORDERS} are possible")


def repeat_counts(repeats: Tensor, *, output_size: int | None = None) -> None:
    """Checks `aten.repeat_interleave.Tensor`, whose result has as many places as the repeats add up to.

    The kernel computes the sum in 64 bits, where it may wrap around, and writes all repeats.
    """
    integers("repeats", repeats, 1)
    if readable(repeats):
        between("repeats", repeats, 0, _MOST_REPEATS)
        total = float(repeats.double().sum())
        require(
            total <= _MOST_REPEATS, f"repeats add up to {total:.3g}; at most {_MOST_REPEATS} are possible"
        )


def repeat_interleave(
    self: Tensor, repeats: Tensor, dim: int | None = None, *, output_size: int | None = None
) -> None:
    """Checks `aten.repeat_interleave.self_Tensor`."""
    dense("self", self)
    repeat_counts(repeats)


def bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Checks `aten.bilinear`, which computes one feature of the answer after the other."""
    _rounds("weight", dense("weight", weight, 3).shape[0])


def trilinear(
    i1: Tensor,
    i2: Tensor,
    i3: Tensor,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> None:
    """Checks `aten._trilinear`, which computes one place of `unroll_dim` after the other."""
    for name, x, expand in (("i1", i1, expand1), ("i2", i2, expand2), ("i3", i3, expand3)):
        sizes = list(dense(name, x).shape)
        for dim in sorted(expand):
            sizes.insert(dim, 1)
        if 0 <= unroll_dim < len(sizes):
            _rounds(name, sizes[unroll_dim])


def _rounds(name: str, size: int) -> None:
    if isinstance(size, int) and size > _MOST_ROUNDS:
        raise OperandError(f"{name} has {size} features; up to {_MOST_ROUNDS} are possible")
