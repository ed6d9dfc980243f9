"""Distances and similarities between rows.

cosine_similarity    <a, b> / (|a| |b|) along a dim of the broadcast shape
pairwise_distance    |a - b + eps| along the last dim
cdist                |a[p] - b[r]| of all pairs of rows: a: [N, *, P, D], b: [N, *, R, D], y: [N, *, P, R]
"""

from __future__ import annotations

from ..ir.values import Shared, Stacked, Value, WideValue
from ..registry.registry import strategy
from ..registry.samples import B, call, samples
from ..registry.writer import Writer, rank


def _aligned(w: Writer, *values: WideValue) -> tuple[int, list[Value]]:
    """Returns the largest rank, and the values raised to it; Shared values broadcast."""
    top = max(map(rank, values))
    return top, [w.align(v, top) if isinstance(v, Stacked) else v.value for v in values]  # type: ignore[union-attr]


@strategy("cosine_similarity", "shifted", family="distance")
def cosine(w: Writer, a: WideValue, b: WideValue, dim: int = 1, eps: float = 1e-8) -> WideValue:
    """counts the dim from the end: the member axis is one more leading dim"""
    top, values = _aligned(w, a, b)
    return Stacked(w.call("cosine_similarity", *values, dim % top - top, eps))


@strategy("pairwise_distance", "leading", family="distance")
def pairwise(
    w: Writer, a: WideValue, b: WideValue, p: float = 2, eps: float = 1e-6, keepdim: bool = False
) -> WideValue:
    """works on the last dim: the member axis is one more leading dim"""
    return Stacked(w.call("pairwise_distance", *_aligned(w, a, b)[1], p, eps, keepdim))


@strategy("cdist _cdist_forward", "leading", family="distance")
def cdist(w: Writer, a: WideValue, b: WideValue, p: float = 2, mode: int | None = None) -> WideValue:
    """works on the last two dims: the member axis is one more leading dim"""
    _, values = _aligned(w, a, b)
    if any(
        isinstance(x, Shared) and v.ndim <= 3 for x, v in zip((a, b), values)
    ):  # not every kernel broadcasts a matrix against a batch of matrices
        values = [
            w.stack(x) if isinstance(x, Shared) and rank(x) == rank_ else v
            for x, v, rank_ in zip((a, b), values, (max(rank(a), rank(b)),) * 2)
        ]
    return Stacked(w.call(w.op, *values, p, mode))


samples("cosine_similarity")(
    lambda draw: [
        call(draw.normal(B, 4), draw.normal(B, 4)),
        call(draw.normal(B, 1, 4), draw.normal(6, 4), -1, 1e-6),
        call(draw.normal(B, 4), draw.normal(4), 1),
        call(draw.normal(4), draw.normal(B, 4), 0),
    ]
)
samples("pairwise_distance")(
    lambda draw: [
        call(draw.normal(B, 4), draw.normal(*s), *r)
        for s, r in (((B, 4), ()), ((4,), (1.0, 1e-6, True)), ((1, 4), (3.0,)))
    ]
)
samples("cdist")(
    lambda draw: [
        call(draw.normal(*a), draw.normal(*b), *p)
        for a, b in (((B, 4), (6, 4)), ((B, 7, 4), (6, 4)), ((B, 2, 4), (B, 6, 4)))
        for p in ((), (1.0,))
    ]
)
samples("_cdist_forward")(
    lambda draw: [call(draw.normal(B, 4), draw.normal(6, 4), p, None) for p in (2.0, 1.0)]
)
