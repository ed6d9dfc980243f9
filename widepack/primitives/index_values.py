"""What the strategies of indices have in common: masks, the members' numbers, indices along a dim."""

from __future__ import annotations

from typing import Any

import torch

from ..ir.values import GatheredMatrices, Shared, Stacked, Value, WideValue
from ..registry.writer import Writer, rank


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


def gathered(x: WideValue, at: int, index: WideValue) -> GatheredMatrices | None:
    """Returns the parts of matrices that whole numbers select from `[E, P, Q]`; None for other reads."""
    if at != 0 or rank(x) != 3 or index.value.dtype not in (torch.int32, torch.int64):  # type: ignore[union-attr]
        return None
    both = isinstance(x, (Shared, Stacked)) and isinstance(index, (Shared, Stacked))
    return GatheredMatrices(x, index) if both else None  # type: ignore[arg-type]
