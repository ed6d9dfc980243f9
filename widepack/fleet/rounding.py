"""Computes ulps, and the noise that rounding adds to a matrix.

An ulp is the distance between two neighbouring numbers of a dtype. Rounding moves a number by up to half an
ulp; the root mean square is ulp / sqrt(12).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""The dtypes of weights that are unmerged."""
# How many roundings the difference itself has passed. A merge in 16 bits rounds the product of the factors
# once. One in float32 adds up the products of the factors in float32.
_ROUNDINGS_OF_DIFFERENCE = {torch.bfloat16: 1.0, torch.float16: 1.0, torch.float32: 16.0, torch.float64: 16.0}

_DECOMPOSITION = 16.0


def ulps(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the ulp of each element in a dtype, as float64. The values may have a wider dtype."""
    limits = torch.finfo(dtype)
    if values.dtype == torch.float64 or dtype == torch.float64:
        bits = values.double().contiguous().view(torch.int64) & (0x7FF << 52)
        exponents = bits.view(torch.float64)
    else:
        exponents = (
            (values.float().contiguous().view(torch.int32) & (0xFF << 23)).view(torch.float32).double()
        )
    return exponents.clamp_min(limits.smallest_normal).mul_(limits.eps)


def shorter_dtype(members: Sequence[Tensor]) -> torch.dtype | None:
    """Returns a shorter dtype that has all numbers of all members; None if there is none."""
    for dtype in (torch.bfloat16, torch.float16):
        if members[0].dtype in (torch.float32, torch.float64) and all(
            torch.equal(m.to(dtype).to(m.dtype), m) for m in members
        ):
            return dtype
    return None


@dataclass(frozen=True)
class Noise:
    """The noise of rounding in a difference W - base of matrices.

    rms: of all elements. edge: a bound of the largest singular value of such noise. plain: the root mean
    square of rounding W alone. ulp: the root mean square of the ulps of W.
    """

    rms: float
    edge: float
    plain: float
    ulp: float


def noise_of(weight: Tensor, difference: Tensor, dtype: torch.dtype, rounded: int = 1) -> Noise:
    """Returns the noise of a difference.

    weight: [O, I]. difference: weight - base in float64. rounded: how many of weight and base are rounded.
    The edge is the largest norm of a row and that of a column together, which for noise of equal elements is
    rms * (sqrt(O) + sqrt(I)).
    """
    squares = ulps(weight, dtype).square_()
    plain = float(squares.mean())
    squares.mul_(rounded).add_(ulps(difference, dtype).square_(), alpha=_ROUNDINGS_OF_DIFFERENCE[dtype])
    rows, columns = squares.sum(1), squares.sum(0)
    edge = math.sqrt(float(rows.max())) + math.sqrt(float(columns.max()))
    rms = math.sqrt(float(rows.sum()) / squares.numel())
    if dtype == torch.float64:  # the decomposition, which is in float64 too, adds its own noise
        own = _DECOMPOSITION * torch.finfo(dtype).eps * float(torch.linalg.vector_norm(difference))
        edge, rms = edge + own, rms + own / (math.sqrt(weight.shape[0]) + math.sqrt(weight.shape[1]))
    scale = math.sqrt(12)
    return Noise(rms / scale, edge / scale, math.sqrt(plain) / scale, math.sqrt(plain))
