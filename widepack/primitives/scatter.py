"""Gather and scatter along a dim, with an index tensor of the same rank; one_hot.

gather             y[i][k] = x[i][index[i][k]] along dim                x: [N, *s]    index, y: [N, *t]
scatter            y[i] = x[i], with y[i][index[i][k]] = src[i][k]      x, y: [N, *s]    index, src: [N, *t]
scatter_add, ...   the same, where numbers are added or reduced
masked_scatter     y[i] = x[i], with the next numbers of src[i] where mask[i] is true
one_hot            y[i][..., x[i]] = 1, else 0                          x: [N, *s]    y: [N, *s, classes]
"""

from __future__ import annotations

from typing import Any

import torch

from ..ir.values import Stacked, WideValue
from ..registry.families import along
from ..registry.registry import strategy
from ..registry.samples import B, Draw, Sample, call, samples
from ..registry.writer import Writer, rank


@samples("gather")
def _gathers(draw: Draw) -> list[Sample]:
    return [call(draw.normal(B, 4, 6), d, draw.ints(0, 4, 3, 2, 6)) for d in (0, 1, -1)] + [
        call(draw.normal(4), 0, draw.ints(0, 4, 2)),
        call(draw.normal(), 0, draw.ints(0, 1)),
    ]


def _rows(draw: Draw, *shape: int) -> torch.Tensor:
    """Returns indices along dim 0 without duplicates: two writes to one position have no defined result."""
    return torch.stack([torch.randperm(4, generator=draw.generator)[: shape[0]] for _ in range(shape[1])], 1)


@samples("scatter.src scatter_add")
def _scatters(draw: Draw) -> list[Sample]:
    return [
        call(draw.normal(4, 6), 0, _rows(draw, 3, 6), draw.normal(3, 6)),
        call(draw.normal(6, 4), -1, _rows(draw, 2, 6).t(), draw.normal(6, 2)),
        call(draw.normal(4, 6), 0, _rows(draw, 3, 2), draw.normal(4, 6)),
    ]


samples("scatter.value")(
    lambda draw: [
        call(draw.normal(4, 6), 0, draw.ints(0, 4, 3, 6), 0.5),
        call(draw.normal(B, 4), -1, draw.ints(0, 4, B, 2), 1.0),
    ]
)


samples("scatter.reduce")(
    lambda draw: [
        call(draw.normal(4, 6), d, draw.ints(0, 4, 3, 2), draw.normal(3, 2), reduce=r)
        for d, r in ((0, "add"), (-1, "multiply"))
    ]
)


samples("scatter.value_reduce")(
    lambda draw: [
        call(draw.normal(4, 6), d, draw.ints(0, 4, 3, 2), 0.5, reduce=r)
        for d, r in ((0, "add"), (-1, "multiply"))
    ]
)


samples("scatter_reduce.two")(
    lambda draw: [
        call(draw.normal(B, 4), d, draw.ints(0, 4, 3, 2), draw.normal(3, 2), r, include_self=include)
        for d, r, include in ((0, "sum", True), (1, "amax", False), (-1, "mean", True), (0, "prod", True))
    ]
)
samples("take_along_dim")(
    lambda draw: [
        call(draw.normal(B, 4, 6), draw.ints(0, 4, B, 2, 6), 1),
        call(draw.normal(B, 4), draw.ints(0, 4, B, 4), -1),
    ]
)


@samples("masked_scatter")
def _masked_scatters(draw: Draw) -> list[Sample]:
    return [
        call(draw.normal(B, 4), draw.bools(B, 4), draw.normal(B, 4)),
        call(draw.normal(B, 4, 6), draw.bools(4, 1), draw.normal(B, 30)),
        call(draw.normal(4), draw.bools(4), draw.normal(7)),
    ]


samples("one_hot")(
    lambda draw: [call(draw.ints(0, 4, B, 3), 4), call(draw.ints(0, 4), 6)]
)  # without a number of classes the shape depends on the data
along("gather scatter.src scatter.value scatter_add scatter_reduce.two scatter.reduce scatter.value_reduce")
along("take_along_dim", needs="dim", family="index")


@strategy("masked_scatter", "gather", family="index")
def masked_scatter(w: Writer, x: WideValue, mask: WideValue, source: WideValue) -> WideValue:
    """every true position takes the next number of the member's source"""
    base = w.stack(x)
    chosen = w.call("expand", w.align(Stacked(w.stack(mask)), rank(x)), [w.members, *w.sizes(x)])
    flat = w.call("flatten.using_ints", chosen, 1, -1)
    place = w.call("clamp_min", w.call("sub.Scalar", w.call("cumsum", flat, 1), 1), 0)
    taken = w.call("gather", w.call("flatten.using_ints", w.stack(source), 1, -1), 1, place)
    return Stacked(w.call("where.self", chosen, w.call("reshape", taken, [w.members, *w.sizes(x)]), base))


@strategy("one_hot", "leading", family="leading", when=lambda w, x, classes=-1: classes >= 0)
def one_hot(w: Writer, x: Stacked, classes: int = -1) -> Any:
    """one more trailing dim; without a number of classes each member would count its own classes"""
    return Stacked(w.call("one_hot", x.value, classes))
