"""Histograms: histc.

    y[i, b] = how many numbers of x[i] lie in bin b    x: [N, *s]    y: [N, bins]

The bins split the range from `min` to `max` into equal parts. The last bin includes `max`. Numbers outside
the range are not counted.
"""

from __future__ import annotations

import torch

from ..ir.values import Stacked
from ..registry.families import flat_member
from ..registry.registry import strategy
from ..registry.samples import B, Draw, Sample, call, samples
from ..registry.writer import Writer

_INT = torch.int64


@strategy("histc", "scatter", family="counts", when=lambda w, x, bins=100, min=0, max=0: min < max)
def histc(
    w: Writer, x: Stacked, bins: int = 100, min: float = 0, max: float = 0
) -> Stacked:  # the schema's names
    """every number adds one to the bin of its member

    Without a range (min = max = 0) the range comes from the data of each member, and no strategy applies.
    """
    flat = flat_member(w, x)
    counted = w.call("logical_and", w.call("ge.Scalar", flat, min), w.call("le.Scalar", flat, max))
    place = w.call(
        "div.Scalar", w.call("mul.Scalar", w.call("sub.Scalar", flat, min), bins), max - min
    )  # in the order in which torch computes it, so that the ends of bins are exact
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
