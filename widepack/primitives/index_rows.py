"""Reading and adding whole rows at positions that all members share: edges of graphs, positions of tokens.

    index_select    y[i] = the rows index of x[i] along dim          x: [N, *s]    index: [K]
    index.Tensor    y[i] = x[i][:, index]                            index: [*t], one for all members
    index_put       y[i] = x[i], with values[i] added at index       accumulate=True

| strategy | when | how |
|---|---|---|
| `index_select` of index_select | a Shared index, not along the last dim | moves the dim by one |
| `rows` of index.Tensor | one Shared index of whole numbers, rows of `ROW` numbers or more | index_select |
| `rows` of index_put | the same, added, values of the rows' own shape | index_add |

These ops copy rows. `gather`, `index` and `index_put` copy number by number, and take two to twenty times as
long. They are registered before the other strategies of these ops (indexing.py, index_writes.py).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..ir.values import Shared, Stacked, Value, WideValue, expression, known
from ..registry.registry import strategy
from ..registry.writer import Writer, rank
from .index_values import gathered

ROW = 16
"""The numbers of a row from which the strategies `rows` apply."""
_WHOLE = (torch.int32, torch.int64)


def _not_last(w: Writer, x: WideValue, dim: int, index: WideValue) -> bool:
    return isinstance(index, Shared) and isinstance(x, Stacked) and 0 <= dim % max(1, rank(x)) < rank(x) - 1


@strategy("index_select", "index_select", family="index", when=_not_last)
def index_select(w: Writer, x: Stacked, dim: int, index: Shared) -> WideValue:
    """for Shared indices: moves the dim by one, for the member axis"""
    y = w.call("index_select", x.value, 1 + dim % rank(x), index.value)
    return Stacked(y, gathered=gathered(x, dim % rank(x), index) if rank(index) == 1 else None)


def _indexed_dim(x: WideValue, indices: list[Any]) -> int | None:
    """Returns the member's dim that one Shared index of whole numbers reads rows along; None for others."""
    present = [d for d, i in enumerate(indices) if i is not None]
    if len(present) != 1 or not isinstance(x, (Shared, Stacked)):
        return None
    (dim,) = present
    index = indices[dim]
    if not isinstance(index, Shared) or index.value.dtype not in _WHOLE or not rank(index):
        return None
    row = [known(s) for s in _sizes(x)[dim + 1 :]]
    return dim if row and math.prod(s or 1 for s in row) >= ROW else None


def _sizes(x: Shared | Stacked) -> list[Any]:
    """Returns the member's sizes of a value, for conditions: without nodes."""
    sizes = list(x.value.fake.shape)
    return sizes[1:] if isinstance(x, Stacked) else sizes


def _flat_index(w: Writer, x: WideValue, dim: int, index: Shared) -> Value:
    """Returns the positions `[K]` of an index, counted from the start: index_select takes no others.

    A position before the start becomes one after the end, which every backend refuses.
    """
    flat: Value = index.value
    if rank(index) > 1:
        flat = w.call("flatten.using_ints", flat, 0, -1)
    size = w.sizes(x)[dim]
    from_end = w.call("add.Scalar", flat, size)
    found = w.call("where.self", w.call("lt.Scalar", flat, 0), from_end, flat)
    return w.call("where.ScalarOther", w.call("ge.Scalar", from_end, 0), found, size)


def _reads_rows(w: Writer, x: WideValue, indices: list[Any]) -> bool:
    return isinstance(x, Stacked) and _indexed_dim(x, indices) is not None


@strategy("index.Tensor", "rows", family="index", when=_reads_rows)
def index_rows(w: Writer, x: Stacked, indices: list[Any]) -> WideValue:
    """for one Shared index: index_select, which copies whole rows"""
    (dim,) = (d for d, i in enumerate(indices) if i is not None)
    index = indices[dim]
    y = w.call("index_select", x.value, 1 + dim, _flat_index(w, x, dim, index))
    if rank(index) > 1:
        y = w.call("unflatten.int", y, 1 + dim, w.sizes(index))
    return Stacked(y, gathered=gathered(x, dim, index) if len(indices) == 1 else None)


def _adds_rows(
    w: Writer, x: WideValue, indices: list[Any], values: WideValue, accumulate: bool = False
) -> bool:
    dim = _indexed_dim(x, indices) if accumulate else None
    if dim is None or not isinstance(values, Stacked) or values.value.dtype != x.value.dtype:  # type: ignore[union-attr]
        return False
    if not x.value.dtype.is_floating_point:  # type: ignore[union-attr]
        return False
    whole = _sizes(x)  # type: ignore[arg-type]
    expected = [*whole[:dim], *indices[dim].value.fake.shape, *whole[dim + 1 :]]
    found = values.value.fake.shape[1:]
    return len(found) == len(expected) and all(
        expression(a) == expression(b) for a, b in zip(found, expected)
    )


@strategy("index_put", "rows", family="index", when=_adds_rows)
def add_rows(
    w: Writer, x: WideValue, indices: list[Any], values: Stacked, accumulate: bool = False
) -> WideValue:
    """for one Shared index and values that are added: index_add, which adds whole rows"""
    (dim,) = (d for d, i in enumerate(indices) if i is not None)
    index, source = indices[dim], values.value
    if rank(index) > 1:
        source = w.call("flatten.using_ints", source, 1 + dim, dim + rank(index))
    return Stacked(w.call("index_add", w.own_memory(x), 1 + dim, _flat_index(w, x, dim, index), source))
