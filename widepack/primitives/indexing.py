"""Reading at indices: `x[i, :, j]` and index_select.

    index.Tensor    y[i] = x[i][index[i]]                      x: [N, *s]    index: [N, *t] or [*t], or a mask
    index_select    y[i] = the positions index[i] along dim    x: [N, *s]    index: [N, K] or [K]

| strategy of index.Tensor | when | how |
|---|---|---|
| `parted` | indices with a None between them | moves the indexed dims to the front, as torch does |
| `shared` | all indices Shared, side by side | one more None in front |
| `members` | whole-number indices, side by side | the members' numbers are one more index tensor |

The op refuses an index out of range. Every strategy refuses it too, because it checks against the member's
dim.
"""

from __future__ import annotations

from typing import Any

import torch

from ..ir.values import GatheredMatrices, Shared, Stacked, Value, WideValue
from ..registry.registry import strategy
from ..registry.samples import (
    B,
    Draw,
    Sample,
    call,
    samples,
)
from ..registry.writer import Writer, put_shared, rank


@samples("index_select")
def _index_selects(draw: Draw) -> list[Sample]:
    x = draw.normal(B, 4, 6)
    return [
        call(x, 0, draw.ints(0, B, 3)),
        call(x, 1, draw.ints(0, 4, 7)),
        call(x, -1, draw.ints(0, 6, 2)),
        call(x, -1, draw.ints(0, 6)),
        call(draw.normal(4), 0, draw.ints(0, 4, 2)),
        call(draw.normal(), 0, draw.ints(0, 1, 1)),
    ]


@samples("index.Tensor")
def _indices(draw: Draw) -> list[Sample]:
    x = draw.normal(B, 4, 6, 3)

    def ids(high: int, *shape: int) -> torch.Tensor:
        return draw.ints(-high, high, *shape)

    # the same for every seed: masks with other numbers of true positions give a Ragged result
    mask = torch.tensor([True, False, True, True])
    return [
        call(x, [ids(B, 2)]),
        call(x, [ids(B, 2), ids(4, 2)]),
        call(x, [ids(B, 2, 1), ids(4, 7)]),
        call(x, [None, ids(4, 2)]),
        call(x, [None, ids(4, 2), ids(6, 2)]),
        call(x, [None, ids(4, 2, 7)]),
        call(x, [None, None, ids(6, 7)]),
        call(x, [None, ids(4), ids(6, 2)]),
        call(x, [ids(B)]),
        call(x, [None, ids(4)]),
        call(x, [ids(B, 2), None, ids(6, 2)]),
        call(x, [None, ids(4, 2), None, ids(3, 2)]),
        call(x, [None, ids(4, 2), None]),
        call(x, [None, mask]),
        call(x, [None, mask, ids(6, 3)]),
        call(x, [ids(B, 2).to(torch.int32)]),
    ]


def is_mask(i: WideValue | None) -> bool:
    """Whether an index is a mask."""
    return i is not None and i.value.dtype in (torch.bool, torch.uint8)  # type: ignore[union-attr]


def adjacent(indices: list[Any]) -> bool:
    """Whether the indices have no None between them."""
    at = [i for i, v in enumerate(indices) if v is not None]
    return at == list(range(at[0], at[-1] + 1))


def member_numbers(w: Writer, indices: list[Any], top: int) -> list[Any]:
    """Returns the members' numbers `[N, 1, ...]`, then the indices without None.

    All of them have rank `top`, the member axis not counted.
    """
    present = [i for i in indices if i is not None]
    first: Value = present[0].value
    numbers = w.call("arange", w.members, dtype=torch.int64, device=first.fake.device)
    for _ in range(top):
        numbers = w.call("unsqueeze", numbers, -1)
    return [numbers, *(w.align(i, top) if isinstance(i, Stacked) else i.value for i in present)]


def gathered(x: WideValue, at: int, index: WideValue) -> GatheredMatrices | None:
    """Returns the parts of matrices that whole numbers select from `[E, P, Q]`; None for other reads."""
    if at != 0 or rank(x) != 3 or index.value.dtype not in (torch.int32, torch.int64):  # type: ignore[union-attr]
        return None
    both = isinstance(x, (Shared, Stacked)) and isinstance(index, (Shared, Stacked))
    return GatheredMatrices(x, index) if both else None  # type: ignore[arg-type]


def _parted(w: Writer, x: WideValue, indices: list[Any]) -> bool:
    return not adjacent(indices) and not any(map(is_mask, indices))


@strategy("index.Tensor", "parted", family="index", when=_parted)
def index_parted(w: Writer, x: WideValue, indices: list[Any]) -> WideValue:
    """moves the indexed dims to the front, as torch does where indices have a None between them"""
    at = [d for d, i in enumerate(indices) if i is not None]
    present = [i for i in indices if i is not None]
    base = w.call(
        "permute", w.stack(x), [0, *(1 + d for d in at), *(1 + d for d in range(rank(x)) if d not in at)]
    )
    if all(isinstance(i, Shared) for i in present):
        return Stacked(w.call("index.Tensor", base, [None, *put_shared(present)]))
    return Stacked(w.call("index.Tensor", base, member_numbers(w, present, max(map(rank, present)))))


def _plain_index(w: Writer, x: WideValue, indices: list[Any]) -> bool:
    present = [i for i in indices if i is not None]
    shared = all(isinstance(i, Shared) for i in present)
    return shared and isinstance(x, Stacked) and adjacent(indices)


@strategy("index.Tensor", "shared", family="index", when=_plain_index)
def index_shared(w: Writer, x: Stacked, indices: list[Any]) -> WideValue:
    """for Shared indices: one more None in front"""
    parts = gathered(x, 0, indices[0]) if len(indices) == 1 else None
    return Stacked(w.call("index.Tensor", x.value, [None, *put_shared(indices)]), gathered=parts)


def _whole_number_indices(w: Writer, x: WideValue, indices: list[Any]) -> bool:
    present = [i for i in indices if i is not None]
    return all(i.value.dtype not in (torch.bool, torch.uint8) for i in present) and adjacent(indices)


@strategy("index.Tensor", "members", family="index", when=_whole_number_indices)
def index_by_member(w: Writer, x: WideValue, indices: list[Any]) -> WideValue:
    """for Stacked indices: the members' numbers are one more index tensor"""
    at = [d for d, i in enumerate(indices) if i is not None]
    first, top = at[0], max(rank(indices[d]) for d in at)
    numbers, *aligned = member_numbers(w, indices, top)
    y = w.call("index.Tensor", w.stack(x), [numbers, *indices[:first], *aligned, *indices[at[-1] + 1 :]])
    if first == 0:
        return Stacked(y, gathered=gathered(x, 0, indices[0]) if len(indices) == 1 else None)
    # With N in front the index tensors have a None between them. So torch puts their dims first, and the
    # permutation moves them back.
    dims = list(range(1 + top, 1 + top + first))  # the dims before the first index
    order = [0, *dims, *range(1, 1 + top), *range(1 + top + first, y.ndim)]
    return Stacked(w.call("permute", y, order))


def has_dims(w: Writer, x: WideValue, dim: int, index: WideValue, *_: Any, **__: Any) -> bool:
    """Whether the member's x has dims."""
    return rank(x) > 0


def spread(w: Writer, index: WideValue, dim: int, like: Value) -> Value:
    """Expands indices `[N, K]` to `[N, ..., K, ...]`, as gather and scatter take them.

    K lies along the member's dim `dim`. The other dims have the sizes of `like`.
    """
    value = w.align(Stacked(w.stack(index)), 1)
    for d in range(1, like.ndim):
        if d != dim + 1:
            value = w.call("unsqueeze", value, d)
    value = w.call("_to_copy", value, dtype=torch.int64) if value.dtype != torch.int64 else value
    sizes = [s if s is not None else w.call("sym_size.int", like, d) for d, s in enumerate(like.sizes)]
    return w.call("expand", value, [*sizes[: dim + 1], -1, *sizes[dim + 2 :]])


@strategy("index_select", "gather", family="index", when=has_dims)
def select_by_member(w: Writer, x: WideValue, dim: int, index: WideValue) -> WideValue:
    """a gather along the dim"""
    base = w.stack(x)
    y = w.call("gather", base, 1 + dim % rank(x), spread(w, index, dim % rank(x), base))
    return Stacked(y, gathered=gathered(x, dim % rank(x), index) if rank(index) == 1 else None)


@strategy(
    "index_select",
    "index_select",
    family="index",
    when=lambda w, x, dim, index: isinstance(index, Shared) and rank(x) > 0,
)
def index_select(w: Writer, x: Stacked, dim: int, index: Shared) -> WideValue:
    """for Shared indices: moves the dim by one, for the member axis"""
    y = w.call("index_select", x.value, 1 + dim % x.rank, index.value)
    return Stacked(y, gathered=gathered(x, dim % x.rank, index) if rank(index) == 1 else None)
