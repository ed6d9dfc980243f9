"""Embedding: `y[i, ...] = W[i, ids[i, ...]]`, W: [N, V, D], ids: [N, *] or [*], y: [N, *, D].

An index that the member alone would refuse (negative, or V and more) is refused here too: both ops check against V, never against N*V.
"""

from __future__ import annotations

from typing import Any

import torch

from ..registry import strategy
from ..samples_of_ops import B, Draw, Sample, call, samples
from ..values import Shared, Stacked, Wide
from ..writer import Writer, rank


def _ids_shared(w: Writer, weight: Wide, ids: Wide, *_: Any, **__: Any) -> bool:
    return isinstance(ids, Shared)


def _weight_shared(w: Writer, weight: Wide, ids: Wide, *_: Any, **__: Any) -> bool:
    return isinstance(weight, Shared)


@strategy("embedding", "one_table", family="embedding", when=_weight_shared)
def one_table(w: Writer, weight: Shared, ids: Stacked, *_: Any, **__: Any) -> Wide:
    """a Shared table: one look-up of all members' ids"""
    return Stacked(w.call("embedding", weight.value, ids.value))


@strategy("embedding", "index_select", family="embedding", when=_ids_shared)
def index_select(w: Writer, weight: Stacked, ids: Shared, *_: Any, **__: Any) -> Wide:
    """Shared ids: rows of all tables at once"""
    flat, back = _flat(w, ids.value, 0, rank(ids))
    return Stacked(back(w.call("index_select", weight.value, 1, flat)))


@strategy("embedding", "gather", family="embedding")
def gather(w: Writer, weight: Wide, ids: Wide, *_: Any, **__: Any) -> Wide:
    """ids of their own: a gather along each table's rows"""
    table = w.stack(weight)  # [N, V, D]
    flat, back = _flat(w, w.stack(ids), 1, rank(ids))  # [N, R]
    width = table.sizes[2]
    rows = w.call("expand", w.call("unsqueeze", flat, -1), [-1, -1, width if width is not None else w.call("sym_size.int", table, 2)])
    rows = w.call("_to_copy", rows, dtype=torch.int64) if rows.dtype != torch.int64 else rows
    return Stacked(back(w.call("gather", table, 1, rows)))


def _flat(w: Writer, ids: Any, first: int, rank_: int) -> tuple[Any, Any]:
    """ids with the member's dims flattened into one, and the way back for `[N, R, D]`."""
    if rank_ == 1:
        return ids, lambda y: y
    if rank_ == 0:
        return w.call("unsqueeze", ids, first), lambda y: w.call("squeeze.dim", y, 1)
    sizes = [s if s is not None else w.call("sym_size.int", ids, d) for d, s in enumerate(ids.sizes)][first:]
    return w.call("flatten.using_ints", ids, first, -1), lambda y: w.call("unflatten.int", y, 1, sizes)


@samples("embedding")
def _embedding(draw: Draw) -> list[Sample]:
    shapes: list[tuple[int, ...]] = [(), (B,), (B, 3), (2, B, 3)]
    own = [call(draw.normal(7, 4), draw.ints(0, 7, *s)) for s in shapes]
    return [*own, call(draw.normal(7, 4), draw.ints(0, 7, B, 3), 2), call(draw.normal(7, 4), draw.ints(0, 7, B, 3, dtype=torch.int32))]
