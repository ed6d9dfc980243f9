"""Checks the operands of the ops behind Fourier transforms: torch checks them in its public functions."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .require import OperandError, dense, require


def _dims(self: Tensor, dim: Sequence[int], normalization: int) -> None:
    rank = dense("self", self).dim()
    places = [d for d in dim if isinstance(d, int) and 0 <= d < rank]
    if not places or len(set(places)) != len(dim) or not all(self.shape[d] for d in places):
        raise OperandError(f"transforms the dims {list(dim)[:8]} of {list(self.shape)}")
    require(normalization in (0, 1, 2), f"normalization is {normalization}; 0, 1 or 2 are possible")


def c2c(self: Tensor, dim: Sequence[int], normalization: int, forward: bool) -> None:
    """Checks `aten._fft_c2c`."""
    _dims(self, dim, normalization)
    require(self.is_complex(), f"self is {self.dtype}; a complex dtype is needed")


def r2c(self: Tensor, dim: Sequence[int], normalization: int, onesided: bool) -> None:
    """Checks `aten._fft_r2c`."""
    _dims(self, dim, normalization)
    require(self.is_floating_point(), f"self is {self.dtype}; a floating dtype is needed")


def c2r(self: Tensor, dim: Sequence[int], normalization: int, last_dim_size: int) -> None:
    """Checks `aten._fft_c2r`."""
    _dims(self, dim, normalization)
    require(self.is_complex(), f"self is {self.dtype}; a complex dtype is needed")
    have = self.shape[dim[-1]]
    if last_dim_size < 1 or last_dim_size // 2 + 1 != have:
        raise OperandError(f"last_dim_size is {last_dim_size}; the last dim has {have} numbers")
