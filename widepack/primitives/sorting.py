"""Ops that order the numbers along a dim: sort, topk, median, mode and quantiles.

sort, argsort    y[i] = the numbers of x[i] in order along dim, or their indices     x, y: [N, *s]
topk, kthvalue   y[i] = the k largest numbers, or the k-th smallest one    y: [N, ..., k, ...]
median, mode     y[i] = one number along dim, with its index; without dim: of all numbers of the member
quantile         y[i] = the q-th quantile along dim; q: a number or [Q], then y: [N, Q, ...]
"""

from __future__ import annotations

from typing import Any

import torch

from ..ir.values import Shared, Stacked, WideValue
from ..registry.families import along, whole_by_dim
from ..registry.registry import strategy
from ..registry.samples import B, along_dim, call, reduced, samples, whole
from ..registry.writer import Writer, put_shared, rank

samples("argsort sort")(along_dim())
samples("topk")(
    lambda draw: (
        [call(draw.normal(B, 4, 6), 2, *d) for d in ((), (0,), (1, False), (-1, True, True))]
        + [call(draw.normal(), 1)]
    )
)


samples("sort.stable argsort.stable")(
    lambda draw: [
        call(draw.ints(0, 3, B, 4), stable=True, dim=d, descending=o)
        for d, o in ((0, False), (1, True), (-1, False))
    ]
)


samples("kthvalue")(
    lambda draw: [
        call(draw.normal(B, 4, 6), 2, 0),
        call(draw.normal(B, 4, 6), 3, 1, True),
        call(draw.normal(4), 1),
    ]
)
samples("median.dim mode nanmedian.dim")(reduced)
samples("median nanmedian")(whole)
samples("quantile.scalar nanquantile.scalar")(
    lambda draw: (
        [call(draw.normal(B, 4, 6), 0.3, d, k) for d, k in ((0, False), (-1, True), (1, False))]
        + [call(draw.normal(4), 0.5, 0)]
    )
)


samples("quantile nanquantile")(
    lambda draw: (
        [call(draw.normal(B, 4, 6), torch.tensor([0.2, 0.7]), d, k) for d, k in ((0, False), (-1, True))]
        + [call(draw.normal(B, 4), torch.tensor(0.5), 1)]
    )
)
along("topk sort sort.stable argsort argsort.stable kthvalue median.dim nanmedian.dim mode")
whole_by_dim("median", "median.dim")
whole_by_dim("nanmedian", "nanmedian.dim")


def _one_quantile(w: Writer, x: WideValue, q: Any, dim: Any = None, *rest: Any, **kwargs: Any) -> bool:
    return (
        isinstance(x, Stacked)
        and rank(x) > 0
        and isinstance(dim, int)
        and (isinstance(q, float) or (isinstance(q, Shared) and rank(q) <= 1))
    )


@strategy(
    "quantile quantile.scalar nanquantile nanquantile.scalar", "shifted", family="dim", when=_one_quantile
)
def quantiles(w: Writer, x: Stacked, q: Any, dim: int, *rest: Any, **kwargs: Any) -> Any:
    """works along the member's dim

    torch puts the dim of several quantiles first, before the member axis; it moves to dim 1.
    """
    y = w.call(w.op, x.value, put_shared(q), dim % x.rank + 1, *rest, **kwargs)
    return Stacked(w.call("transpose.int", y, 0, 1) if isinstance(q, Shared) and rank(q) == 1 else y)
