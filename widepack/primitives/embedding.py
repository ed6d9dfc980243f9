"""Embedding tables and embedding bags.

    embedding        y[i, ...] = W[i, ids[i, ...]]    W: [N, V, D]    ids: [N, *] or [*]    y: [N, *, D]
    embedding_bag    y[i, b] = sum, mean or maximum of W[i, ids of bag b]
                     ids: [N, L] or [L]    offsets: [bags]    y: [N, bags, D]

A bag treats all columns alike. So one bag over a table `[V, N*D]` serves all members, their columns side by
side.

| strategy | when | how |
|---|---|---|
| `one_table` | W Shared | one look-up of all members' ids |
| `index_select` | ids Shared | rows of all tables at once |
| `gather` | few rows on a CPU; any number elsewhere | a gather along the rows of each table |
| `flat_index` | W Stacked | one table of N*V rows, ids shifted to each member's first row |

The op refuses an id that is negative or at least V. Every strategy refuses it too: it checks against V, not
N*V.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..ir import ops
from ..ir.values import Shared, Stacked, Value, WideValue, hint
from ..registry.registry import strategy
from ..registry.samples import B, Draw, Sample, call, samples
from ..registry.writer import Writer, put_shared, rank


def _ids_shared(w: Writer, weight: WideValue, ids: WideValue, *_: Any, **__: Any) -> bool:
    return isinstance(ids, Shared)


def _weight_shared(
    w: Writer,
    weight: WideValue,
    ids: WideValue,
    padding: int = -1,
    by_freq: bool = False,
    sparse: bool = False,
) -> bool:
    return isinstance(weight, Shared) and not by_freq  # by_freq counts the ids of each member separately


@strategy("embedding", "one_table", family="embedding", when=_weight_shared)
def one_table(w: Writer, weight: Shared, ids: Stacked, padding: int = -1, *_: Any, **__: Any) -> WideValue:
    """for a Shared table: one look-up of all members' ids"""
    return Stacked(w.call("embedding", weight.value, ids.value, *([padding] if padding >= 0 else [])))


# index_select and gather have no padding row, whose gradient is zero: members that train use flat_index.
@strategy("embedding", "index_select", family="embedding", when=_ids_shared, derivative=False)
def index_select(w: Writer, weight: Stacked, ids: Shared, *_: Any, **__: Any) -> WideValue:
    """for Shared ids: selects the rows of all tables at once"""
    flat, back = _flat(w, ids.value, 0, rank(ids))
    return Stacked(back(w.call("index_select", weight.value, 1, flat)))


GATHERED = 8192
"""The largest count of numbers in all members' rows for which a gather is the fastest on a CPU.

A gather is one op, but it copies number by number.
"""


def _few(w: Writer, weight: WideValue, ids: WideValue, *_: Any, **__: Any) -> bool:
    if w.device != "cpu" or not isinstance(weight, Stacked):
        return True
    sizes = ids.value.fake.shape[1 if isinstance(ids, Stacked) else 0 :]  # type: ignore[union-attr]
    rows = math.prod(hint(s) for s in sizes)
    return w.members * rows * hint(weight.value.fake.shape[2]) <= GATHERED


@strategy("embedding", "gather", family="embedding", when=_few, derivative=False)
def gather(w: Writer, weight: WideValue, ids: WideValue, *_: Any, **__: Any) -> WideValue:
    """for Stacked ids: a gather along the rows of each table"""
    table = w.stack(weight)  # [N, V, D]
    flat, back = _flat(w, w.stack(ids), 1, rank(ids))  # [N, R]
    width = table.sizes[2]
    rows = w.call(
        "expand",
        w.call("unsqueeze", flat, -1),
        [-1, -1, width if width is not None else w.call("sym_size.int", table, 2)],
    )
    rows = w.call("_to_copy", rows, dtype=torch.int64) if rows.dtype != torch.int64 else rows
    return Stacked(back(w.call("gather", table, 1, rows)))


@strategy(
    "embedding",
    "flat_index",
    family="embedding",
    when=lambda w, weight, *_, **__: isinstance(weight, Stacked) and weight.value.sizes[-2] is not None,
)
def flat_index(
    w: Writer, weight: Stacked, ids: WideValue, padding: int = -1, by_freq: bool = False, sparse: bool = False
) -> WideValue:
    """one table of N*V rows, each member's ids shifted to its first row"""
    numbers, table = _numbers(w, weight, w.stack(ids), rank(ids)), weight.value
    if padding >= 0:  # the padding row gets no gradient
        still = w.call("select.int", w.call("detach", table), 1, padding)
        table = w.call("select_scatter", table, still, 1, padding)
    return Stacked(w.call("embedding", w.call("flatten.using_ints", table, 0, 1), numbers, -1, by_freq))


def _numbers(w: Writer, weight: Stacked, ids: Value, rank_: int) -> Value:
    """Returns ids `[N, ...]` as row numbers of one table of N*V rows.

    An id out of range would select another member's row. It becomes -1, which the table refuses.
    """
    size = _vocabulary(weight)
    start = w.align(
        Stacked(
            w.call("arange.start_step", 0, w.members * size, size, dtype=torch.int64, device=ids.fake.device)
        ),
        rank_,
    )
    inside = w.call("eq.Tensor", w.call("clamp", ids, 0, size - 1), ids)
    return w.call("where.ScalarOther", inside, w.call("add.Tensor", ids, start), -1)


def _flat(w: Writer, ids: Any, first: int, rank_: int) -> tuple[Any, Any]:
    """Flattens the member's dims of ids, and returns a function that restores them in `[N, R, D]`."""
    if rank_ == 1:
        return ids, lambda y: y
    if rank_ == 0:
        return w.call("unsqueeze", ids, first), lambda y: w.call("squeeze.dim", y, 1)
    sizes = [s if s is not None else w.call("sym_size.int", ids, d) for d, s in enumerate(ids.sizes)][first:]
    return w.call("flatten.using_ints", ids, first, -1), lambda y: w.call("unflatten.int", y, 1, sizes)


_BAGS = "embedding_bag embedding_bag.padding_idx"


def _bag(w: Writer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments by name, with defaults; `padding_idx` is None where there is no padding row."""
    bound = {a: d for a, _, d in ops.arguments(w.op)} | ops.bind(w.op, args, kwargs)
    return {**bound, "padding_idx": bound.get("padding_idx")}


def _bag_fits(w: Writer, *args: Any, **kwargs: Any) -> bool:
    # scale_grad_by_freq counts how often the bags of one member use a row.
    bound = _bag(w, args, kwargs)
    if bound["per_sample_weights"] is not None and bound["mode"] != 0:
        return False  # the op refuses weights for other modes, with its own message
    return (
        isinstance(bound["offsets"], Shared)
        and rank(bound["indices"]) == 1
        and not bound["scale_grad_by_freq"]
    )


def _bag_shared(w: Writer, *args: Any, **kwargs: Any) -> bool:
    bound = _bag(w, args, kwargs)
    return (
        _bag_fits(w, *args, **kwargs)
        and isinstance(bound["indices"], Shared)
        and not isinstance(bound["per_sample_weights"], Stacked)
    )


@strategy(_BAGS, "columns", family="bag", when=_bag_shared)
def bag_columns(w: Writer, *args: Any, **kwargs: Any) -> Any:
    """for Shared ids: one bag over the columns of all tables side by side"""
    bound = _bag(w, args, kwargs)
    return _bags(
        w,
        w.stack(bound["weight"]),
        bound["indices"].value,
        bound,
        put_shared(bound["per_sample_weights"]),
        bound["padding_idx"],
    )


def _bag_flat(w: Writer, *args: Any, **kwargs: Any) -> bool:
    # A last offset may leave ids out, and the padding row has another number in each table.
    bound = _bag(w, args, kwargs)
    return (
        _bag_fits(w, *args, **kwargs)
        and isinstance(bound["weight"], Stacked)
        and bound["padding_idx"] is None
        and not bound["include_last_offset"]
    )


@strategy(_BAGS, "flat", family="bag", when=_bag_flat)
def bag_flat(w: Writer, *args: Any, **kwargs: Any) -> Any:
    """one table of N*V rows, the members' bags one after the other"""
    bound = _bag(w, args, kwargs)
    weight, ids, offsets, scales = (
        bound["weight"],
        w.stack(bound["indices"]),
        bound["offsets"].value,
        bound["per_sample_weights"],
    )
    numbers = w.call("flatten.using_ints", _numbers(w, weight, ids, 1), 0, 1)  # [N*L]
    length = w.sizes(Stacked(ids))[0]
    first = w.call(
        "mul.Tensor", w.call("arange", w.members, dtype=offsets.dtype, device=offsets.fake.device), length
    )  # [N]
    starts = w.call(
        "flatten.using_ints", w.call("add.Tensor", w.call("unsqueeze", first, 1), offsets), 0, 1
    )  # [N*bags]
    table = w.call("flatten.using_ints", weight.value, 0, 1)
    weights = None if scales is None else w.call("flatten.using_ints", w.stack(scales), 0, 1)
    out = w.call(
        "embedding_bag.padding_idx", table, numbers, starts, False, bound["mode"], False, weights, False, None
    )
    return (
        Stacked(w.call("unflatten.int", w.call("operator.getitem", out, 0), 0, [w.members, -1])),
        None,
        None,
        None,
    )


def _bag_rows(w: Writer, *args: Any, **kwargs: Any) -> bool:
    # The maximum without the padding rows depends on the order in which a bag reads NaN, so the op itself
    # runs it.
    bound = _bag(w, args, kwargs)
    return _bag_fits(w, *args, **kwargs) and (bound["padding_idx"] is None or bound["mode"] != 2)


@strategy(_BAGS, "rows", family="bag", when=_bag_rows)
def bag_rows(w: Writer, *args: Any, **kwargs: Any) -> Any:
    """looks the rows up first, then one bag over the columns of all members side by side

    A sum or a mean leaves out the padding rows.
    """
    bound = _bag(w, args, kwargs)
    ids, padding, mode = Stacked(w.stack(bound["indices"])), bound["padding_idx"], bound["mode"]
    weight = bound["weight"]
    rule: Any = one_table if isinstance(weight, Shared) else gather if _few(w, weight, ids) else flat_index
    rows = rule(w, weight, ids).value  # [N, L, D]
    if bound["per_sample_weights"] is not None:
        rows = w.call("mul.Tensor", rows, w.call("unsqueeze", w.stack(bound["per_sample_weights"]), -1))
    at = w.call("arange", w.sizes(ids)[0], dtype=ids.value.dtype, device=rows.fake.device)
    if padding is None:
        return _bags(w, rows, at, bound, None, None)
    kept = w.call("unsqueeze", w.call("ne.Scalar", ids.value, padding % _vocabulary(weight)), -1)  # [N, L, 1]
    rows = w.call("where.ScalarOther", kept, rows, 0.0)
    y = _bags(w, rows, at, {**bound, "mode": 0}, None, None)[0].value
    if mode == 1:
        count = _bags(w, w.call("_to_copy", kept, dtype=rows.dtype), at, {**bound, "mode": 0}, None, None)[
            0
        ].value
        y = w.call("div.Tensor", y, w.call("clamp_min", count, 1))
    return Stacked(y), None, None, None


def _vocabulary(weight: WideValue) -> int:
    size = weight.value.sizes[-2]  # type: ignore[union-attr]
    assert size is not None  # the sizes of a weight are static
    return size


def _bags(
    w: Writer, table: Value, ids: Value, bound: dict[str, Any], weights: Value | None, padding: int | None
) -> Any:
    """Runs bags over tables `[N, V, D]` with Shared ids, the columns of all tables side by side."""
    wide = w.call("flatten.using_ints", w.call("transpose.int", table, 0, 1), 1, 2)  # [V, N*D]
    out = w.call(
        "embedding_bag.padding_idx",
        wide,
        ids,
        bound["offsets"].value,
        False,
        bound["mode"],
        False,
        weights,
        bound["include_last_offset"],
        padding,
    )
    y = w.call("unflatten.int", w.call("operator.getitem", out, 0), 1, [w.members, -1])
    return Stacked(w.call("transpose.int", y, 0, 1)), None, None, None


def _bag_samples(draw: Draw) -> list[Sample]:
    out = []
    for mode in (0, 1, 2):
        table, ids = draw.normal(7, 4), draw.ints(0, 7, 9)
        out += [
            call(table, ids, torch.tensor([0, 2, 2, 9 if last else 6]), False, mode, False, None, last, *p)
            for last, p in ((False, (None,)), (True, (-4,)), (False, (3,)))
        ]
    return [*out, call(table, ids, torch.tensor([0, 4]), False, 0, False, draw.normal(9), False, None)]


samples("embedding_bag.padding_idx")(_bag_samples)
samples("embedding_bag")(lambda draw: [call(*a[:-1]) for a, _ in _bag_samples(draw) if a[-1] is None])


@samples("embedding")
def _embedding(draw: Draw) -> list[Sample]:
    shapes: list[tuple[int, ...]] = [(), (B,), (B, 3), (2, B, 3)]
    by_shape = [call(draw.normal(7, 4), draw.ints(0, 7, *s)) for s in shapes]
    return [
        *by_shape,
        call(draw.normal(7, 4), draw.ints(0, 7, B, 3), 2),
        call(draw.normal(7, 4), draw.ints(0, 7, B, 3, dtype=torch.int32)),
    ]
