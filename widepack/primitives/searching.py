"""Look-ups in tables: searchsorted, bucketize and isin.

searchsorted, bucketize    y[i] = the position of x[i] in the sorted table[i]    table: [N, S] or [S]
isin                       y[i] = whether x[i] is one of the numbers among[i]    among: [N, *t] or [*t]

x and y are [N, *s].
"""

from __future__ import annotations

from typing import Any

from ..ir.values import Shared, Stacked, Value, WideValue
from ..registry.families import flat_member, value_of
from ..registry.registry import strategy
from ..registry.samples import B, Draw, Sample, call, samples
from ..registry.writer import Writer, rank


@samples("searchsorted.Tensor")
def _searches(draw: Draw) -> list[Sample]:
    table = draw.normal(6).sort()[0]
    rows = draw.normal(B, 6).sort(1)[0]
    return [
        call(table, draw.normal(B, 4)),
        call(table, draw.normal(4), right=True),
        call(rows, draw.normal(B, 7), out_int32=True),
        call(table, draw.normal()),
    ]


samples("bucketize.Tensor")(
    lambda draw: [
        call(draw.normal(*s), draw.normal(6).sort()[0], **k)
        for s, k in (((B, 4), {}), ((4,), {"right": True}), ((), {}))
    ]
)
samples("isin.Tensor_Tensor")(
    lambda draw: [
        call(draw.ints(0, 9, B, 4), draw.ints(0, 9, 3)),
        call(draw.ints(0, 9, B), draw.ints(0, 9, 4), invert=True),
        call(draw.ints(0, 9), draw.ints(0, 9, 3)),
    ]
)


samples("isin.Scalar_Tensor")(
    lambda draw: [
        call(2, draw.ints(0, 9, B, 3)),
        call(2, draw.ints(0, 9, 4), invert=True),
        call(1, draw.ints(0, 3)),
    ]
)


def _search(w: Writer, table: Value, x: Value, kwargs: dict[str, Any]) -> Value:
    """Searches the numbers of each member in its table, a row of `[N, S]`."""
    flat = w.call(
        "contiguous", w.call("flatten.using_ints", x, 1, -1) if x.ndim > 1 else w.call("unsqueeze", x, 1)
    )
    y = w.call("searchsorted.Tensor", w.call("contiguous", table), flat, **kwargs)
    return w.call(
        "reshape", y, [s if s is not None else w.call("sym_size.int", x, d) for d, s in enumerate(x.sizes)]
    )


@strategy(
    "searchsorted.Tensor",
    "rows",
    family="index",
    when=lambda w, table, x, **k: k.get("sorter") is None and rank(table) in (1, rank(x)),
)
def searchsorted(w: Writer, table: WideValue, x: WideValue, **kwargs: Any) -> WideValue:
    """searches row by row: the numbers of one member are one row"""
    if rank(table) > 1:
        return Stacked(
            w.call("searchsorted.Tensor", *(w.call("contiguous", w.stack(v)) for v in (table, x)), **kwargs)
        )
    if isinstance(table, Shared):
        return Stacked(w.call("searchsorted.Tensor", table.value, w.call("contiguous", w.stack(x)), **kwargs))
    return Stacked(_search(w, w.stack(table), w.stack(x), kwargs))


@strategy("bucketize.Tensor", "rows", family="index")
def bucketize(w: Writer, x: WideValue, table: WideValue, **kwargs: Any) -> WideValue:
    """searches row by row: the numbers of one member are one row"""
    if isinstance(table, Shared):
        return Stacked(w.call("bucketize.Tensor", w.call("contiguous", w.stack(x)), table.value, **kwargs))
    return Stacked(_search(w, w.stack(table), w.stack(x), kwargs))


@strategy("isin.Tensor_Tensor", "any", family="dim")
def isin(
    w: Writer, x: WideValue, among: WideValue, *, assume_unique: bool = False, invert: bool = False
) -> Any:
    """one look-up for all members; compares every pair where `among` is Stacked"""
    if isinstance(among, Shared):
        return Stacked(
            w.call("isin.Tensor_Tensor", w.call("contiguous", value_of(x)), among.value, invert=invert)
        )
    dims = rank(x)
    rows = flat_member(w, among) if isinstance(among, Stacked) else among  # [N, numbers]
    for _ in range(dims):
        rows = w.call("unsqueeze", rows, 1)
    hits = w.call("any.dim", w.call("eq.Tensor", w.call("unsqueeze", w.stack(x), -1), rows), -1)
    return Stacked(w.call("logical_not", hits) if invert else hits)


@strategy("isin.Scalar_Tensor", "any", family="dim")
def number_isin(
    w: Writer, number: Any, among: Stacked, *, assume_unique: bool = False, invert: bool = False
) -> Any:
    """compares every number"""
    hits = w.call("any.dim", w.call("eq.Scalar", flat_member(w, among), number), 1)
    return Stacked(w.call("logical_not", hits) if invert else hits)
