"""Embedding: `y[i, ...] = W[i, ids[i, ...]]`, W: [N, V, D], ids: [N, *] or [*], y: [N, *, D].

Embedding bags sum, average or maximise the rows of each bag: ids: [N, L] or [L], offsets: [bags], y: [N, bags, D]. A bag treats every column alike, so the
members' columns stand side by side: one bag over a table `[V, N*D]`.

| strategy | when | how |
|---|---|---|
| `one_table` | W Shared | one look-up of all members' ids |
| `index_select` | ids Shared | rows of all tables at once |
| `gather` | few rows on a CPU; any elsewhere | ids of their own along each table's rows, number by number |
| `flat_index` | W Stacked | one table of N*V rows, ids counted from each member's first row |

An index that the member alone would refuse (negative, or V and more) is refused here too: every strategy checks against V, never against N*V.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..ir import ops
from ..registry.registry import strategy
from ..registry.samples import B, Draw, Sample, call, samples
from ..ir.values import Shared, Stacked, Value, Wide, hint
from ..registry.writer import Writer, put_shared, rank


def _ids_shared(w: Writer, weight: Wide, ids: Wide, *_: Any, **__: Any) -> bool:
    return isinstance(ids, Shared)


def _weight_shared(w: Writer, weight: Wide, ids: Wide, padding: int = -1, by_freq: bool = False, sparse: bool = False) -> bool:
    return isinstance(weight, Shared) and not by_freq  # each member counts its own ids


@strategy("embedding", "one_table", family="embedding", when=_weight_shared)
def one_table(w: Writer, weight: Shared, ids: Stacked, padding: int = -1, *_: Any, **__: Any) -> Wide:
    """a Shared table: one look-up of all members' ids"""
    return Stacked(w.call("embedding", weight.value, ids.value, *([padding] if padding >= 0 else [])))


# index_select and gather know no padding, whose row learns nothing: members that train take flat_index
@strategy("embedding", "index_select", family="embedding", when=_ids_shared, derivative=False)
def index_select(w: Writer, weight: Stacked, ids: Shared, *_: Any, **__: Any) -> Wide:
    """Shared ids: rows of all tables at once"""
    flat, back = _flat(w, ids.value, 0, rank(ids))
    return Stacked(back(w.call("index_select", weight.value, 1, flat)))


GATHERED = 8192
"""Numbers of all members' rows up to which a gather is faster on a CPU: it is one op, and takes its rows number by number."""


def _few(w: Writer, weight: Wide, ids: Wide, *_: Any, **__: Any) -> bool:
    if w.device != "cpu" or not isinstance(weight, Stacked):
        return True
    sizes = ids.value.held.shape[1 if isinstance(ids, Stacked) else 0 :]  # type: ignore[union-attr]
    rows = math.prod(hint(s) for s in sizes)
    return w.members * rows * hint(weight.value.held.shape[2]) <= GATHERED


@strategy("embedding", "gather", family="embedding", when=_few, derivative=False)
def gather(w: Writer, weight: Wide, ids: Wide, *_: Any, **__: Any) -> Wide:
    """ids of their own: a gather along each table's rows"""
    table = w.stack(weight)  # [N, V, D]
    flat, back = _flat(w, w.stack(ids), 1, rank(ids))  # [N, R]
    width = table.sizes[2]
    rows = w.call("expand", w.call("unsqueeze", flat, -1), [-1, -1, width if width is not None else w.call("sym_size.int", table, 2)])
    rows = w.call("_to_copy", rows, dtype=torch.int64) if rows.dtype != torch.int64 else rows
    return Stacked(back(w.call("gather", table, 1, rows)))


@strategy("embedding", "flat_index", family="embedding", when=lambda w, weight, *_, **__: isinstance(weight, Stacked))
def flat_index(w: Writer, weight: Stacked, ids: Wide, padding: int = -1, by_freq: bool = False, sparse: bool = False) -> Wide:
    """one table of N*V rows, each member's ids counted from its first row"""
    numbers, table = _numbers(w, weight, w.stack(ids), rank(ids)), weight.value
    if padding >= 0:  # its row learns nothing
        still = w.call("select.int", w.call("detach", table), 1, padding)
        table = w.call("select_scatter", table, still, 1, padding)
    return Stacked(w.call("embedding", w.call("flatten.using_ints", table, 0, 1), numbers, -1, by_freq))


def _numbers(w: Writer, weight: Stacked, own: Value, rank_: int) -> Value:
    """ids `[N, ...]` of rank 1 + rank_, counted in one table of N*V rows. What a member refuses would be another member's row: it becomes -1, which no table has."""
    size = _vocabulary(weight)
    start = w.align(Stacked(w.call("arange.start_step", 0, w.members * size, size, dtype=torch.int64, device=own.held.device)), rank_)
    inside = w.call("eq.Tensor", w.call("clamp", own, 0, size - 1), own)
    return w.call("where.ScalarOther", inside, w.call("add.Tensor", own, start), -1)


def _flat(w: Writer, ids: Any, first: int, rank_: int) -> tuple[Any, Any]:
    """ids with the member's dims flattened into one, and the way back for `[N, R, D]`."""
    if rank_ == 1:
        return ids, lambda y: y
    if rank_ == 0:
        return w.call("unsqueeze", ids, first), lambda y: w.call("squeeze.dim", y, 1)
    sizes = [s if s is not None else w.call("sym_size.int", ids, d) for d, s in enumerate(ids.sizes)][first:]
    return w.call("flatten.using_ints", ids, first, -1), lambda y: w.call("unflatten.int", y, 1, sizes)


_BAGS = "embedding_bag embedding_bag.padding_idx"


def _bag(w: Writer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name, padding (None: none) among them."""
    given = {a: d for a, _, d in ops.arguments(w.op)} | ops.bind(w.op, args, kwargs)
    return {**given, "padding_idx": given.get("padding_idx")}


def _bag_fits(w: Writer, *args: Any, **kwargs: Any) -> bool:
    given = _bag(w, args, kwargs)  # how often a member meets a row (which scales gradients) its own bags alone tell
    if given["per_sample_weights"] is not None and given["mode"] != 0:
        return False  # the op takes them for sums alone, and says so
    return isinstance(given["offsets"], Shared) and rank(given["indices"]) == 1 and not given["scale_grad_by_freq"]


def _bag_shared(w: Writer, *args: Any, **kwargs: Any) -> bool:
    given = _bag(w, args, kwargs)
    return _bag_fits(w, *args, **kwargs) and isinstance(given["indices"], Shared) and not isinstance(given["per_sample_weights"], Stacked)


@strategy(_BAGS, "columns", family="bag", when=_bag_shared)
def bag_columns(w: Writer, *args: Any, **kwargs: Any) -> Any:
    """Shared ids: one bag over the columns of all tables side by side"""
    given = _bag(w, args, kwargs)
    return _bags(w, w.stack(given["weight"]), given["indices"].value, given, put_shared(given["per_sample_weights"]), given["padding_idx"])


def _bag_flat(w: Writer, *args: Any, **kwargs: Any) -> bool:
    given = _bag(w, args, kwargs)  # a last offset may leave numbers out, and a padding row is another one in each table
    return (
        _bag_fits(w, *args, **kwargs) and isinstance(given["weight"], Stacked) and given["padding_idx"] is None and not given["include_last_offset"]
    )


@strategy(_BAGS, "flat", family="bag", when=_bag_flat)
def bag_flat(w: Writer, *args: Any, **kwargs: Any) -> Any:
    """one table of N*V rows, the members' bags one after the other"""
    given = _bag(w, args, kwargs)
    weight, ids, offsets, scales = given["weight"], w.stack(given["indices"]), given["offsets"].value, given["per_sample_weights"]
    numbers = w.call("flatten.using_ints", _numbers(w, weight, ids, 1), 0, 1)  # [N*L]
    length = w.sizes(Stacked(ids))[0]
    first = w.call("mul.Tensor", w.call("arange", w.members, dtype=offsets.dtype, device=offsets.held.device), length)  # [N]
    starts = w.call("flatten.using_ints", w.call("add.Tensor", w.call("unsqueeze", first, 1), offsets), 0, 1)  # [N*bags]
    table = w.call("flatten.using_ints", weight.value, 0, 1)
    weights = None if scales is None else w.call("flatten.using_ints", w.stack(scales), 0, 1)
    made = w.call("embedding_bag.padding_idx", table, numbers, starts, False, given["mode"], False, weights, False, None)
    return Stacked(w.call("unflatten.int", w.call("operator.getitem", made, 0), 0, [w.members, -1])), None, None, None


def _bag_rows(w: Writer, *args: Any, **kwargs: Any) -> bool:
    given = _bag(w, args, kwargs)  # the maximum over what is no padding hangs on the order in which a bag meets NaN: left to the op itself
    return _bag_fits(w, *args, **kwargs) and (given["padding_idx"] is None or given["mode"] != 2)


@strategy(_BAGS, "rows", family="bag", when=_bag_rows)
def bag_rows(w: Writer, *args: Any, **kwargs: Any) -> Any:
    """ids of their own: their rows first, then one bag over the columns of all members side by side; padding is left out of sum and mean"""
    given = _bag(w, args, kwargs)
    ids, padding, mode = Stacked(w.stack(given["indices"])), given["padding_idx"], given["mode"]
    weight = given["weight"]
    rule: Any = one_table if isinstance(weight, Shared) else gather if _few(w, weight, ids) else flat_index
    rows = rule(w, weight, ids).value  # [N, L, D]
    if given["per_sample_weights"] is not None:
        rows = w.call("mul.Tensor", rows, w.call("unsqueeze", w.stack(given["per_sample_weights"]), -1))
    at = w.call("arange", w.sizes(ids)[0], dtype=ids.value.dtype, device=rows.held.device)
    if padding is None:
        return _bags(w, rows, at, given, None, None)
    kept = w.call("unsqueeze", w.call("ne.Scalar", ids.value, padding % _vocabulary(weight)), -1)  # [N, L, 1]
    rows = w.call("where.ScalarOther", kept, rows, 0.0)
    y = _bags(w, rows, at, {**given, "mode": 0}, None, None)[0].value
    if mode == 1:
        count = _bags(w, w.call("_to_copy", kept, dtype=rows.dtype), at, {**given, "mode": 0}, None, None)[0].value
        y = w.call("div.Tensor", y, w.call("clamp_min", count, 1))
    return Stacked(y), None, None, None


def _vocabulary(weight: Wide) -> int:
    size = weight.value.sizes[-2]  # type: ignore[union-attr]
    assert size is not None  # a weight's sizes are known
    return size


def _bags(w: Writer, table: Value, ids: Value, given: dict[str, Any], weights: Value | None, padding: int | None) -> Any:
    """Bags over `[N, V, D]` with the same ids for all members, whose columns stand side by side."""
    wide = w.call("flatten.using_ints", w.call("transpose.int", table, 0, 1), 1, 2)  # [V, N*D]
    made = w.call(
        "embedding_bag.padding_idx", wide, ids, given["offsets"].value, False, given["mode"], False, weights, given["include_last_offset"], padding
    )
    y = w.call("unflatten.int", w.call("operator.getitem", made, 0), 1, [w.members, -1])
    return Stacked(w.call("transpose.int", y, 0, 1)), None, None, None


def _bag_samples(draw: Draw) -> list[Sample]:
    made = []
    for mode in (0, 1, 2):
        table, ids = draw.normal(7, 4), draw.ints(0, 7, 9)
        made += [
            call(table, ids, torch.tensor([0, 2, 2, 9 if last else 6]), False, mode, False, None, last, *p)
            for last, p in ((False, (None,)), (True, (-4,)), (False, (3,)))
        ]
    return [*made, call(table, ids, torch.tensor([0, 4]), False, 0, False, draw.normal(9), False, None)]


samples("embedding_bag.padding_idx")(_bag_samples)
samples("embedding_bag")(lambda draw: [call(*a[:-1]) for a, _ in _bag_samples(draw) if a[-1] is None])


@samples("embedding")
def _embedding(draw: Draw) -> list[Sample]:
    shapes: list[tuple[int, ...]] = [(), (B,), (B, 3), (2, B, 3)]
    own = [call(draw.normal(7, 4), draw.ints(0, 7, *s)) for s in shapes]
    return [*own, call(draw.normal(7, 4), draw.ints(0, 7, B, 3), 2), call(draw.normal(7, 4), draw.ints(0, 7, B, 3, dtype=torch.int32))]
