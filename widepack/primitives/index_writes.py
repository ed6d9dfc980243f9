"""Writing at indices: `x[i, j] = v` and the index_* ops.

    index_put    y[i] = x[i], with y[i][index[i]] = v[i], or += v[i]     x: [N, *s]    index: [N, *t] or [*t]
    index_add    y[i] = x[i], with src[i] added at index[i] along dim    index: [N, K] or [K]
    index_copy, index_reduce, index_fill    the same with a copy, a reduction or a number

| strategy of index_put | when | how |
|---|---|---|
| `shared` | all indices Shared, side by side | one more None in front |
| `where` | a mask that differs between members, values that do not depend on the position | `where` |
| `members` | whole-number indices | the members' numbers are one more index tensor |

index_rows.py has the strategy that comes before these: one index for all members, whole rows that are added.

The op refuses an index out of range. Every strategy refuses it too, because it checks against the member's
dim.
"""

from __future__ import annotations

from typing import Any

import torch

from ..ir.values import Shared, Stacked, Value, WideValue
from ..registry.registry import strategy
from ..registry.samples import B, Draw, Sample, call, samples
from ..registry.writer import Writer, put_shared, rank
from .index_values import adjacent, has_dims, is_mask, member_numbers, spread


def _unique(draw: Draw, high: int, *shape: int) -> torch.Tensor:
    """Returns indices without duplicates: two writes to one position have no defined result."""
    return torch.randperm(high, generator=draw.generator)[: torch.Size(shape).numel()].view(shape)


@samples("index_put")
def _puts(draw: Draw) -> list[Sample]:
    x = draw.normal(B, 4, 6)
    mask = torch.tensor([True, False, True, True])
    mask_of_member = draw.bools(B, 4)
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
        call(x, [draw.ints(-B, B, 3)], draw.normal(3, 4, 6), True),
        call(draw.normal(B, 4, 24), [None, draw.ints(-4, 4, 3, 2)], draw.normal(B, 3, 2, 24), True),
        call(x, [None, mask], draw.normal(3, 6)),
        call(x, [mask_of_member], draw.normal()),
        call(x, [mask_of_member], draw.normal(6)),
        call(x, [mask_of_member], draw.normal(), True),
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


@samples("index_reduce")
def _reductions(draw: Draw) -> list[Sample]:
    x, index = draw.normal(B, 4, 6), draw.ints(0, 4, 7)
    return [
        call(x, 1, index, draw.normal(B, 7, 6), how, include_self=keep)
        for how in ("prod", "mean", "amax", "amin")
        for keep in (True, False)
    ]


samples("index_fill.int_Scalar")(
    lambda draw: [call(draw.normal(B, 4), d, draw.ints(0, 4, 2), 0.5) for d in (0, 1, -1)]
)


def dims_of_indices(indices: list[Any]) -> list[list[int]]:
    """Returns the member's dims that each index covers; a None covers one dim."""
    dims: list[list[int]] = []
    for i in indices:
        first = dims[-1][-1] + 1 if dims else 0
        dims.append(list(range(first, first + (rank(i) if is_mask(i) else 1))))
    return dims


def _all_shared(w: Writer, x: WideValue, indices: list[Any], *_: Any, **__: Any) -> bool:
    return all(isinstance(i, Shared) for i in indices if i is not None) and adjacent(indices)


@strategy("index_put", "shared", family="index", when=_all_shared)
def put_shared_indices(
    w: Writer, x: WideValue, indices: list[Any], values: WideValue, accumulate: bool = False
) -> WideValue:
    """for Shared indices: one more None in front"""
    present = [i for i in indices if i is not None]
    covered = sum(len(d) for d, i in zip(dims_of_indices(indices), indices) if i is not None)
    full = rank(x) - covered + max(1 if is_mask(i) else rank(i) for i in present)
    value = w.align(values, full) if isinstance(values, Stacked) else values.value  # type: ignore[union-attr]
    return Stacked(w.call("index_put", w.own_memory(x), [None, *put_shared(indices)], value, accumulate))


def _one_mask(
    w: Writer, x: WideValue, indices: list[Any], values: WideValue, accumulate: bool = False
) -> bool:
    present = [i for i in indices if i is not None]
    if len(present) != 1 or not is_mask(present[0]) or indices[-1] is None:
        return False
    return rank(values) <= rank(x) - dims_of_indices(indices)[-1][-1] - 1


@strategy("index_put", "where", family="index", when=_one_mask)
def put_where(
    w: Writer, x: WideValue, indices: list[Any], values: WideValue, accumulate: bool = False
) -> WideValue:
    """for a mask whose values do not depend on the position: `where`"""
    mask: Value = w.stack(indices[-1])
    mask = w.align(Stacked(mask), dims_of_indices(indices)[-1][-1] + 1)
    for _ in range(rank(x) - (mask.ndim - 1)):
        mask = w.call("unsqueeze", mask, -1)
    base = w.stack(x)
    value = w.align(values, rank(x)) if isinstance(values, Stacked) else values.value  # type: ignore[union-attr]
    return Stacked(
        w.call("where.self", mask, w.call("add.Tensor", base, value) if accumulate else value, base)
    )


def _whole_numbers(w: Writer, x: WideValue, indices: list[Any], *_: Any, **__: Any) -> bool:
    return not any(map(is_mask, indices))


@strategy("index_put", "members", family="index", when=_whole_numbers)
def put_by_member(
    w: Writer, x: WideValue, indices: list[Any], values: WideValue, accumulate: bool = False
) -> WideValue:
    """for Stacked indices: the members' numbers are one more index tensor

    The indexed dims move to the front for the write, and back after it.
    """
    at = [d for d, i in enumerate(indices) if i is not None]
    others = [d for d in range(rank(x)) if d not in at]
    top = max(rank(i) for i in indices if i is not None)
    order = [0, *(1 + d for d in at), *(1 + d for d in others)]
    value = w.align(Stacked(w.stack(values)), top + len(others))  # [N, *shape of the member's x[indices]]
    # the number of dims before those of the indices, in the shape of the member's x[indices]
    before = at[0] if adjacent(indices) else 0
    if before:
        leading, of_indices = range(1, 1 + before), range(1 + before, 1 + before + top)
        behind = range(1 + before + top, 1 + top + len(others))
        value = w.call("permute", value, [0, *of_indices, *leading, *behind])
    base = w.call("permute", w.own_memory(x), order)
    y = w.call("index_put", base, member_numbers(w, indices, top), value, accumulate)
    return Stacked(w.call("permute", y, [order.index(d) for d in range(len(order))]))


def _shared_index(w: Writer, x: WideValue, dim: int, index: WideValue, *_: Any, **__: Any) -> bool:
    return isinstance(index, Shared) and rank(x) > 0


@strategy("index_add index_copy", "shifted", family="index", when=_shared_index)
def add_shared(
    w: Writer, x: WideValue, dim: int, index: Shared, source: WideValue, **kwargs: Any
) -> WideValue:
    """for Shared indices: moves the dim by one, for the member axis"""
    return Stacked(w.call(w.op, w.own_memory(x), 1 + dim % rank(x), index.value, w.stack(source), **kwargs))


@strategy("index_add index_copy", "scatter", family="index", when=has_dims)
def add_by_scatter(
    w: Writer, x: WideValue, dim: int, index: WideValue, source: WideValue, *, alpha: float = 1
) -> WideValue:
    """a scatter along the dim"""
    value = w.stack(source)
    where = spread(w, index, dim % rank(x), value)
    value = value if alpha == 1 else w.call("mul.Scalar", value, alpha)
    return Stacked(
        w.call(
            "scatter_add" if "add" in w.op else "scatter.src",
            w.own_memory(x),
            1 + dim % rank(x),
            where,
            value,
        )
    )


@strategy("index_reduce", "scatter", family="index", when=has_dims)
def reduce_at(
    w: Writer,
    x: WideValue,
    dim: int,
    index: WideValue,
    source: WideValue,
    reduce: str,
    *,
    include_self: bool = True,
) -> WideValue:
    """a scatter with the same reduction along the dim"""
    value = w.stack(source)
    where = spread(w, index, dim % rank(x), value)
    return Stacked(
        w.call(
            "scatter_reduce.two",
            w.own_memory(x),
            1 + dim % rank(x),
            where,
            value,
            reduce,
            include_self=include_self,
        )
    )


@strategy("index_fill.int_Scalar", "shifted", family="index", when=_shared_index)
def fill_shared(w: Writer, x: Stacked, dim: int, index: Shared, value: Any) -> WideValue:
    """for Shared indices: moves the dim by one, for the member axis"""
    return Stacked(w.call("index_fill.int_Scalar", w.own_memory(x), 1 + dim % rank(x), index.value, value))
