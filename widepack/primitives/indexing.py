"""Writes at indices, and look-ups in sorted tables.

| strategy of index_put | when | how |
|---|---|---|
| `shared` | all indices Shared, side by side | one more None in front |
| `where` | a mask that differs by member, values that hang on no position | `where` |
| `members` | whole-number indices | the members' numbers are one more index tensor |

An index that the member alone would refuse is refused here too: every op checks against the member's own dim.
"""

from __future__ import annotations

from typing import Any

import torch

from ..registry.families import along
from ..registry.registry import strategy
from ..registry.samples import B, Draw, Sample, call, samples
from ..ir.values import Shared, Stacked, Value, Wide
from ..registry.writer import Writer, put_shared, rank

along("take_along_dim", needs="dim", family="index")


def is_mask(i: Wide | None) -> bool:
    return i is not None and i.value.dtype in (torch.bool, torch.uint8)  # type: ignore[union-attr]


def places(indices: list[Any]) -> list[list[int]]:
    """The member's dims that each index takes; a None takes the one that it stands for."""
    found: list[list[int]] = []
    for i in indices:
        first = found[-1][-1] + 1 if found else 0
        found.append(list(range(first, first + (rank(i) if is_mask(i) else 1))))
    return found


def adjacent(indices: list[Any]) -> bool:
    at = [i for i, v in enumerate(indices) if v is not None]
    return at == list(range(at[0], at[-1] + 1))


def member_numbers(w: Writer, indices: list[Any], top: int) -> list[Any]:
    """The members' numbers `[N, 1, ...]` in front of the indices, all of rank `top` behind the member axis."""
    given = [i for i in indices if i is not None]
    first: Value = given[0].value
    numbers = w.call("arange", w.members, dtype=torch.int64, device=first.held.device)
    for _ in range(top):
        numbers = w.call("unsqueeze", numbers, -1)
    return [numbers, *(w.align(i, top) if isinstance(i, Stacked) else i.value for i in given)]


def _all_shared(w: Writer, x: Wide, indices: list[Any], *_: Any, **__: Any) -> bool:
    return all(isinstance(i, Shared) for i in indices if i is not None) and adjacent(indices)


@strategy("index_put", "shared", family="index", when=_all_shared)
def put_shared_indices(w: Writer, x: Wide, indices: list[Any], values: Wide, accumulate: bool = False) -> Wide:
    """Shared indices: one more None in front"""
    given = [i for i in indices if i is not None]
    taken = sum(len(d) for d, i in zip(places(indices), indices) if i is not None)
    full = rank(x) - taken + max(1 if is_mask(i) else rank(i) for i in given)
    value = w.align(values, full) if isinstance(values, Stacked) else values.value  # type: ignore[union-attr]
    return Stacked(w.call("index_put", w.stack(x), [None, *put_shared(indices)], value, accumulate))


def _one_mask(w: Writer, x: Wide, indices: list[Any], values: Wide, accumulate: bool = False) -> bool:
    given = [i for i in indices if i is not None]
    if len(given) != 1 or not is_mask(given[0]) or indices[-1] is None:
        return False
    return rank(values) <= rank(x) - places(indices)[-1][-1] - 1


@strategy("index_put", "where", family="index", when=_one_mask)
def put_where(w: Writer, x: Wide, indices: list[Any], values: Wide, accumulate: bool = False) -> Wide:
    """a mask of each member's own, values that hang on no position"""
    mask: Value = w.stack(indices[-1])
    mask = w.align(Stacked(mask), places(indices)[-1][-1] + 1)
    for _ in range(rank(x) - (mask.ndim - 1)):
        mask = w.call("unsqueeze", mask, -1)
    base = w.stack(x)
    value = w.align(values, rank(x)) if isinstance(values, Stacked) else values.value  # type: ignore[union-attr]
    return Stacked(w.call("where.self", mask, w.call("add.Tensor", base, value) if accumulate else value, base))


def _whole_numbers(w: Writer, x: Wide, indices: list[Any], *_: Any, **__: Any) -> bool:
    return not any(map(is_mask, indices))


@strategy("index_put", "members", family="index", when=_whole_numbers)
def put_own_indices(w: Writer, x: Wide, indices: list[Any], values: Wide, accumulate: bool = False) -> Wide:
    """indices of their own: the members' numbers are one more index tensor, the dims that are written at come first"""
    at = [d for d, i in enumerate(indices) if i is not None]
    others = [d for d in range(rank(x)) if d not in at]
    top = max(rank(i) for i in indices if i is not None)
    order = [0, *(1 + d for d in at), *(1 + d for d in others)]
    value = w.align(Stacked(w.stack(values)), top + len(others))  # [N, *the indexed shape] of the member
    before = at[0] if adjacent(indices) else 0  # dims that stand before the indices' own in the member's indexed shape
    if before:
        value = w.call(
            "permute", value, [0, *range(1 + before, 1 + before + top), *range(1, 1 + before), *range(1 + before + top, 1 + top + len(others))]
        )
    base = w.call("permute", w.stack(x), order)
    y = w.call("index_put", base, member_numbers(w, indices, top), value, accumulate)
    return Stacked(w.call("permute", y, [order.index(d) for d in range(len(order))]))


def _parted(w: Writer, x: Wide, indices: list[Any]) -> bool:
    return not adjacent(indices) and not any(map(is_mask, indices))


@strategy("index.Tensor", "parted", family="index", when=_parted)
def index_parted(w: Writer, x: Wide, indices: list[Any]) -> Wide:
    """indices that are not side by side: their dims come first, as in the member's own result"""
    at = [d for d, i in enumerate(indices) if i is not None]
    given = [i for i in indices if i is not None]
    base = w.call("permute", w.stack(x), [0, *(1 + d for d in at), *(1 + d for d in range(rank(x)) if d not in at)])
    if all(isinstance(i, Shared) for i in given):
        return Stacked(w.call("index.Tensor", base, [None, *put_shared(given)]))
    return Stacked(w.call("index.Tensor", base, member_numbers(w, given, max(map(rank, given)))))


def _index_shared(w: Writer, x: Wide, dim: int, index: Wide, *_: Any, **__: Any) -> bool:
    return isinstance(index, Shared) and rank(x) > 0


def _index_own(w: Writer, x: Wide, dim: int, index: Wide, *_: Any, **__: Any) -> bool:
    return rank(x) > 0


def _spread(w: Writer, index: Wide, dim: int, like: Value) -> Value:
    """Indices `[N, K]` as `[N, ..., K, ...]` along member dim `dim`, of the sizes of `like` in the other dims."""
    value = w.align(Stacked(w.stack(index)), 1)
    for d in range(1, like.ndim):
        if d != dim + 1:
            value = w.call("unsqueeze", value, d)
    value = w.call("_to_copy", value, dtype=torch.int64) if value.dtype != torch.int64 else value
    sizes = [s if s is not None else w.call("sym_size.int", like, d) for d, s in enumerate(like.sizes)]
    return w.call("expand", value, [*sizes[: dim + 1], -1, *sizes[dim + 2 :]])


@strategy("index_select", "gather", family="index", when=_index_own)
def select_own(w: Writer, x: Wide, dim: int, index: Wide) -> Wide:
    """indices of their own: a gather along the dim"""
    base = w.stack(x)
    return Stacked(w.call("gather", base, 1 + dim % rank(x), _spread(w, index, dim % rank(x), base)))


@strategy("index_add index_copy", "shifted", family="index", when=_index_shared)
def add_shared(w: Writer, x: Wide, dim: int, index: Shared, source: Wide, **kwargs: Any) -> Wide:
    """Shared indices: the dim shifted"""
    return Stacked(w.call(w.op, w.stack(x), 1 + dim % rank(x), index.value, w.stack(source), **kwargs))


@strategy("index_add index_copy", "scatter", family="index", when=_index_own)
def add_own(w: Writer, x: Wide, dim: int, index: Wide, source: Wide, *, alpha: float = 1) -> Wide:
    """indices of their own: a scatter along the dim"""
    value = w.stack(source)
    where = _spread(w, index, dim % rank(x), value)
    value = value if alpha == 1 else w.call("mul.Scalar", value, alpha)
    return Stacked(w.call("scatter_add" if "add" in w.op else "scatter.src", w.stack(x), 1 + dim % rank(x), where, value))


@strategy("index_reduce", "scatter", family="index", when=_index_own)
def reduce_at(w: Writer, x: Wide, dim: int, index: Wide, source: Wide, reduce: str, *, include_self: bool = True) -> Wide:
    """a scatter with the same reduction along the dim"""
    value = w.stack(source)
    where = _spread(w, index, dim % rank(x), value)
    return Stacked(w.call("scatter_reduce.two", w.stack(x), 1 + dim % rank(x), where, value, reduce, include_self=include_self))


@strategy("index_fill.int_Scalar", "shifted", family="index", when=_index_shared)
def fill_shared(w: Writer, x: Stacked, dim: int, index: Shared, value: Any) -> Wide:
    """Shared indices: the dim shifted"""
    return Stacked(w.call("index_fill.int_Scalar", x.value, 1 + dim % rank(x), index.value, value))


@strategy("masked_scatter", "gather", family="index")
def masked_scatter(w: Writer, x: Wide, mask: Wide, source: Wide) -> Wide:
    """every true position takes the next number of its member's source"""
    base = w.stack(x)
    m = w.call("expand", w.align(Stacked(w.stack(mask)), rank(x)), [w.members, *w.sizes(x)])
    flat = w.call("flatten.using_ints", m, 1, -1)
    place = w.call("clamp_min", w.call("sub.Scalar", w.call("cumsum", flat, 1), 1), 0)
    given = w.call("gather", w.call("flatten.using_ints", w.stack(source), 1, -1), 1, place)
    return Stacked(w.call("where.self", m, w.call("reshape", given, [w.members, *w.sizes(x)]), base))


def _search(w: Writer, table: Value, x: Value, kwargs: dict[str, Any]) -> Value:
    """Each member's numbers in its own table `[N, S]`."""
    flat = w.call("contiguous", w.call("flatten.using_ints", x, 1, -1) if x.ndim > 1 else w.call("unsqueeze", x, 1))
    y = w.call("searchsorted.Tensor", w.call("contiguous", table), flat, **kwargs)
    return w.call("reshape", y, [s if s is not None else w.call("sym_size.int", x, d) for d, s in enumerate(x.sizes)])


@strategy("searchsorted.Tensor", "rows", family="index", when=lambda w, table, x, **k: k.get("sorter") is None and rank(table) in (1, rank(x)))
def searchsorted(w: Writer, table: Wide, x: Wide, **kwargs: Any) -> Wide:
    """a table for every member is a table for every row"""
    if rank(table) > 1:
        return Stacked(w.call("searchsorted.Tensor", *(w.call("contiguous", w.stack(v)) for v in (table, x)), **kwargs))
    if isinstance(table, Shared):
        return Stacked(w.call("searchsorted.Tensor", table.value, w.call("contiguous", w.stack(x)), **kwargs))
    return Stacked(_search(w, w.stack(table), w.stack(x), kwargs))


@strategy("bucketize.Tensor", "rows", family="index")
def bucketize(w: Writer, x: Wide, table: Wide, **kwargs: Any) -> Wide:
    """a table for every member is a table for every row"""
    if isinstance(table, Shared):
        return Stacked(w.call("bucketize.Tensor", w.call("contiguous", w.stack(x)), table.value, **kwargs))
    return Stacked(_search(w, w.stack(table), w.stack(x), kwargs))


def _unique(draw: Draw, high: int, *shape: int) -> torch.Tensor:
    """Whole numbers that meet no place twice: which of two writes wins is not defined."""
    return torch.randperm(high, generator=draw.generator)[: torch.Size(shape).numel()].view(shape)


@samples("index_reduce")
def _reductions(draw: Draw) -> list[Sample]:
    x, index = draw.normal(B, 4, 6), draw.ints(0, 4, 7)
    return [call(x, 1, index, draw.normal(B, 7, 6), how, include_self=keep) for how in ("prod", "mean", "amax", "amin") for keep in (True, False)]


@samples("index_put")
def _puts(draw: Draw) -> list[Sample]:
    x = draw.normal(B, 4, 6)
    mask = torch.tensor([True, False, True, True])
    own = draw.bools(B, 4)
    return [
        call(x, [_unique(draw, B, 2)], draw.normal(2, 4, 6)),
        call(x, [_unique(draw, B, 2), _unique(draw, 4, 2)], draw.normal(6)),
        call(x, [None, _unique(draw, 4, 2)], draw.normal(B, 2, 1)),
        call(x, [None, _unique(draw, 4, 2)], draw.normal()),
        call(x, [None, _unique(draw, 4, 2), _unique(draw, 6, 2)], draw.normal(B, 2)),
        call(x, [None, None, _unique(draw, 6, 2)], draw.normal(2)),
        call(x, [_unique(draw, B, 2), None, _unique(draw, 6, 2)], draw.normal(2, 4)),
        call(x, [None, draw.ints(0, 4, 3, 2)], draw.normal(3, 2, 6), True),
        call(x, [draw.ints(-B, B, 3)], draw.normal(1), True),
        call(x, [None, mask], draw.normal(3, 6)),
        call(x, [own], draw.normal()),
        call(x, [own], draw.normal(6)),
        call(x, [own], draw.normal(), True),
        call(x, [None, draw.bools(4, 6)], draw.normal()),
    ]


@samples("index_add index_copy")
def _adds(draw: Draw) -> list[Sample]:
    x = draw.normal(B, 4, 6)
    return [
        call(x, 0, _unique(draw, B, 2), draw.normal(2, 4, 6)),
        call(x, -1, _unique(draw, 6, 3), draw.normal(B, 4, 3)),
        call(x, 1, _unique(draw, 4, 2).to(torch.int64), draw.normal(B, 2, 6)),
        call(draw.normal(4), 0, _unique(draw, 4, 2), draw.normal(2)),
    ]


samples("index_fill.int_Scalar")(lambda draw: [call(draw.normal(B, 4), d, draw.ints(0, 4, 2), 0.5) for d in (0, 1, -1)])
samples("take_along_dim")(lambda draw: [call(draw.normal(B, 4, 6), draw.ints(0, 4, B, 2, 6), 1), call(draw.normal(B, 4), draw.ints(0, 4, B, 4), -1)])


@samples("masked_scatter")
def _scatters(draw: Draw) -> list[Sample]:
    return [
        call(draw.normal(B, 4), draw.bools(B, 4), draw.normal(B, 4)),
        call(draw.normal(B, 4, 6), draw.bools(4, 1), draw.normal(B, 30)),
        call(draw.normal(4), draw.bools(4), draw.normal(7)),
    ]


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
    lambda draw: [call(draw.normal(*s), draw.normal(6).sort()[0], **k) for s, k in (((B, 4), {}), ((4,), {"right": True}), ((), {}))]
)
