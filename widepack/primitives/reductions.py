"""Histogram: y[i, b] = how many numbers of x[i] lie in bin b of `bins` equal ones from `low` to `high`, the last with its right end; others do not count."""

from __future__ import annotations

import torch

from ..registry.registry import strategy
from ..registry.samples import B, Draw, Sample, call, samples
from ..ir.values import Stacked
from ..registry.writer import Writer

_INT = torch.int64


@strategy("histc", "scatter", family="counts", when=lambda w, x, bins=100, min=0, max=0: min < max)
def histc(w: Writer, x: Stacked, bins: int = 100, min: float = 0, max: float = 0) -> Stacked:  # the schema's names
    """every number adds one to its bin of its member; a range that is the data's own is each member's own"""
    flat = x.value if x.rank == 1 else w.call("unsqueeze", x.value, 1) if x.rank == 0 else w.call("flatten.using_ints", x.value, 1, -1)
    counted = w.call("logical_and", w.call("ge.Scalar", flat, min), w.call("le.Scalar", flat, max))
    place = w.call("div.Scalar", w.call("mul.Scalar", w.call("sub.Scalar", flat, min), bins), max - min)  # in torch's own order: ends are met exactly
    index = w.call("clamp", w.call("_to_copy", place, dtype=_INT), 0, bins - 1)
    none = w.call("new_zeros", flat, [w.members, bins])
    return Stacked(w.call("scatter_add", none, 1, index, w.call("_to_copy", counted, dtype=flat.dtype)))


@samples("histc")
def _histc(draw: Draw) -> list[Sample]:
    whole = draw.ints(-1, 6, B, 7)
    return [
        call(whole.float(), 4, 0, 3),
        call(whole.double(), bins=5, min=0, max=4),
        call(draw.normal(B, 3, 4), 9, -1.5, 0.7),
        call(draw.normal(B), 6, -1, 2),
        call(draw.normal(), 3, -1, 1),
        call(draw.normal(B, 4), 5),
    ]
