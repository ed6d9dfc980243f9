"""Reading at indices: `x[i, :, j]` and index_select.

    index.Tensor    y[i] = x[i][index[i]]                      x: [N, *s]    index: [N, *t] or [*t], or a mask
    index_select    y[i] = the positions index[i] along dim    x: [N, *s]    index: [N, K] or [K]

| strategy of index.Tensor | when | how |
|---|---|---|
| `parted` | indices with a None between them | moves the indexed dims to the front, as torch does |
| `shared` | all indices Shared, side by side | one more None in front |
| `members` | whole-number indices, side by side | the members' numbers are one more index tensor |

index_rows.py has the strategies that come before these: one index for all members, whole rows.

The op refuses an index out of range. Every strategy refuses it too, because it checks against the member's
dim.
"""

from __future__ import annotations

from typing import Any

import torch

from ..ir.values import Shared, Stacked, WideValue
from ..registry.registry import strategy
from ..registry.samples import B, Draw, Sample, call, samples
from ..registry.writer import Writer, put_shared, rank
from .index_values import adjacent, gathered, has_dims, is_mask, member_numbers, spread


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
        call(draw.normal(B, 4, 24), [None, ids(4, 2, 3)]),
        call(x, [ids(B, 2), None, ids(6, 2)]),
        call(x, [None, ids(4, 2), None, ids(3, 2)]),
        call(x, [None, ids(4, 2), None]),
        call(x, [None, mask]),
        call(x, [None, mask, ids(6, 3)]),
        call(x, [ids(B, 2).to(torch.int32)]),
    ]


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


@strategy("index_select", "gather", family="index", when=has_dims)
def select_by_member(w: Writer, x: WideValue, dim: int, index: WideValue) -> WideValue:
    """a gather along the dim"""
    base = w.stack(x)
    y = w.call("gather", base, 1 + dim % rank(x), spread(w, index, dim % rank(x), base))
    return Stacked(y, gathered=gathered(x, dim % rank(x), index) if rank(index) == 1 else None)
