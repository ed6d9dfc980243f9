"""Finds the rank and the factors of a matrix above a noise floor.

Small matrices get an exact singular value decomposition. For large ones a randomised range finder (Halko,
Martinsson and Tropp, 2011) draws directions, improves them by power iterations, and widens until the noise
is reached. It has its own seed and does not touch torch's global generator.

`Noise` computes ulps, and the noise that rounding adds to a matrix.

An ulp is the distance between two neighbouring numbers of a dtype. Rounding moves a number by up to half an
ulp; the root mean square is ulp / sqrt(12).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

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


FLOOR = 1.5
"""Singular values above this many edges of the noise are counted."""
MOST_NOISE = 1.75
"""The noise of a low-rank difference is at most this many times that of rounding."""
_EXACT = 256  # the shorter side of a matrix that is decomposed exactly
_WIDTH = 24  # of the first draw
_MARGIN = 6  # directions that a draw has beyond those that count
_SEED = 20_240_229


class LowRank(NamedTuple):
    """A matrix as left @ diag(values) @ right, and the norm of what that leaves.

    left: [O, k]. values: [k], falling. right: [k, I]. All are float64. left_over: the root mean square of
    the elements that the product leaves, as if spread over the dims that it does not take.
    """

    left: Tensor
    values: Tensor
    right: Tensor
    left_over: float

    @property
    def rank(self) -> int:
        return int(self.values.shape[0])


def low_rank(matrix: Tensor, noise: Noise, most: int, powers: int = 1) -> LowRank | None:
    """Returns the directions of a float64 matrix above the noise floor, or None if over `most` are.

    powers: of the power iterations, more where signal and noise are near each other.
    """
    rows, columns = matrix.shape
    if float(torch.linalg.vector_norm(matrix)) <= noise.rms:  # at most one element's rounding in all
        return _cut(_nothing(matrix), 0, matrix)
    shorter = min(rows, columns)
    width = shorter if shorter <= _EXACT else _WIDTH
    while True:
        width = min(width, shorter)
        found = _exact(matrix) if width == shorter else _drawn(matrix, width, powers)
        above = int((found.values > FLOOR * noise.edge).sum())
        if width == shorter or above <= width - _MARGIN:
            cut = _cut(found, above, matrix)
            # Where more noise is left than that of one rounding, the floor rises with it.
            excess = min(MOST_NOISE, max(1.0, cut.left_over / noise.rms))
            count = int((found.values > FLOOR * noise.edge * excess).sum())
            if count < above:
                cut = _cut(found, count, matrix)
            return cut if count <= most else None
        if width >= most + _MARGIN:
            return None
        width = min(3 * width, most + _MARGIN)


def nearest(matrix: Tensor, share: float, most: int) -> LowRank | None:
    """Returns the fewest directions of a float64 matrix that leave at most a part of its norm.

    share: the part. most: the largest rank; None is returned if it leaves more.
    """
    norm = float(torch.linalg.vector_norm(matrix))
    if not norm:
        return _nothing(matrix)
    shorter = min(matrix.shape)
    width = shorter if shorter <= _EXACT else _WIDTH
    while True:
        width = min(width, shorter)
        found = _exact(matrix) if width == shorter else _drawn(matrix, width, 2)
        # What k directions leave: the norm of all, without the squares of the first k.
        left = (norm**2 - found.values.square().cumsum(0)).clamp_min_(0.0).sqrt_()
        enough = (left <= share * norm).nonzero()
        if len(enough) and int(enough[0]) < most:
            return _cut(found, int(enough[0]) + 1, matrix)
        if width == shorter or width >= most:
            return None
        width = min(3 * width, most + _MARGIN)


def improved(matrix: Tensor, start: Tensor, rank: int) -> LowRank:
    """Returns the largest directions of a matrix, from a start that is near their rows.

    start: [k, I] with k >= rank.
    """
    basis = torch.linalg.qr(matrix @ start.t()).Q
    left, values, right = torch.linalg.svd(basis.t() @ matrix, full_matrices=False)
    return LowRank(basis @ left[:, :rank], values[:rank], right[:rank], math.nan)


def cross_rank(a: LowRank, b: LowRank, noise: Noise) -> int:
    """Returns the rank of the difference of two matrices above the noise floor."""
    left = torch.linalg.qr(torch.cat([a.left * a.values, b.left * -b.values], 1)).R
    right = torch.linalg.qr(torch.cat([a.right, b.right]).t()).R
    return int((torch.linalg.svdvals(left @ right.t()) > FLOOR * noise.edge).sum())


def _nothing(matrix: Tensor) -> LowRank:
    rows, columns = matrix.shape
    return LowRank(matrix.new_zeros(rows, 0), matrix.new_zeros(0), matrix.new_zeros(0, columns), 0.0)


def _exact(matrix: Tensor) -> LowRank:
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    return LowRank(left, values, right, 0.0)


def _drawn(matrix: Tensor, width: int, powers: int) -> LowRank:
    """Returns about the `width` largest directions. They are sought in float32 and computed in float64."""
    scale = float(matrix.abs().max())
    narrow = (matrix / scale).float()
    generator = torch.Generator().manual_seed(_SEED)
    start = torch.randn(narrow.shape[1], width, generator=generator)
    basis = torch.linalg.qr(narrow.t() @ torch.linalg.qr(narrow @ start).Q).Q
    for _ in range(powers - 1):
        basis = torch.linalg.qr(narrow.t() @ torch.linalg.qr(narrow @ basis).Q).Q
    wide = torch.linalg.qr(matrix @ basis.double()).Q  # in float64 this product has the directions exactly
    inner = torch.linalg.qr((wide.t() @ matrix).t())
    left, values, right = torch.linalg.svd(inner.R.t(), full_matrices=False)
    return LowRank(wide @ left, values, right @ inner.Q.t(), 0.0)


def _cut(found: LowRank, count: int, matrix: Tensor) -> LowRank:
    """Returns the first directions alone. What they leave is computed without differences of squares."""
    rows, columns = matrix.shape
    beyond = 0.0
    if found.rank < min(rows, columns):
        rest = torch.addmm(matrix, found.left * found.values, found.right, alpha=-1)
        beyond = float(rest.square_().sum())
    squares = beyond + float(found.values[count:].square().sum())
    left_over = math.sqrt(squares / max(1, (rows - count) * (columns - count)))
    return LowRank(found.left[:, :count], found.values[:count], found.right[:count], left_over)
