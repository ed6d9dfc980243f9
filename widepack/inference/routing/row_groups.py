"""Groups the rows of a call by member, and puts answers back in the order of the rows.

`count_padding` counts rows that are computed and are of no call: rows that run again, so that members have as
many rows as a program needs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ...rows.layout import RowAxis


@dataclass(frozen=True)
class RowGroups:
    """The rows of a call by member.

    members: The members that have rows, in the order of their first row. rows: The rows of each, the first
    ones again where the member does not take so few. count: How many rows the call has. whole: Whether the
    rows of each member follow each other already, and none is there twice.
    """

    members: list[int]
    rows: list[list[int]]
    count: int
    whole: bool

    @classmethod
    def of(cls, numbers: Sequence[int], allowed: Callable[[int], bool] | None = None) -> RowGroups:
        """Groups rows.

        Args:
            numbers: The number of the member of each row. All of them are an allowed number of rows.
            allowed: Whether a member takes a number of rows; None if it takes any.
        """
        rows: dict[int, list[int]] = {}
        for row, number in enumerate(numbers):
            rows.setdefault(number, []).append(row)
        found = list(rows.values())
        whole = all(r[-1] - r[0] == len(r) - 1 for r in found)
        if allowed is not None:
            filled = [_filled(r, len(numbers), allowed) for r in found]
            whole, found = whole and filled == found, filled
        return cls(list(rows), found, len(numbers), whole)

    @cached_property
    def order(self) -> Tensor:
        """The rows, member after member."""
        return torch.tensor([row for rows in self.rows for row in rows], device="cpu")

    @cached_property
    def inverse(self) -> Tensor:
        """For each row its place in `order`."""
        found = torch.empty(self.count, dtype=torch.int64, device="cpu")
        found[self.order] = torch.arange(len(self.order), device="cpu")
        return found

    def split(self, value: Tensor, axis: RowAxis | None) -> list[Tensor]:
        """Returns the part of a value for each group. Parts are views where rows follow each other.

        axis: where the rows are; None for a value that all groups get whole.
        """
        if axis is None:
            return [value] * len(self.members)
        sizes = [len(rows) for rows in self.rows]
        if axis.plain:
            ordered = value if self.whole else value.index_select(axis.dim, self.order.to(value.device))
            return list(torch.split(ordered, sizes, axis.dim))
        front, back = value.shape[: axis.dim], value.shape[axis.dim + 1 :]
        places = value.shape[axis.dim] // self.count
        before = 1 if axis.before == 1 else places if axis.after == 1 else axis.before
        apart = value.reshape(*front, before, self.count, places // before, *back)
        if not self.whole:
            apart = apart.index_select(axis.dim + 1, self.order.to(value.device))
        return [p.flatten(axis.dim, axis.dim + 2) for p in torch.split(apart, sizes, axis.dim + 1)]

    def join(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """Returns the answers of all groups in the order of the rows. dim: where the rows are."""
        joined = torch.cat(list(parts), dim)
        return joined if self.whole else joined.index_select(dim, self.inverse.to(joined.device))


def _filled(rows: list[int], most: int, allowed: Callable[[int], bool]) -> list[int]:
    """Returns rows, the first ones again until there is an allowed number of them. most: is allowed."""
    number = next(n for n in range(len(rows), most + 1) if n == most or allowed(n))
    return (rows * -(-number // len(rows)))[:number]


class _Count(threading.local):
    rows = 0


_COUNT = _Count()


def padding_rows() -> int:
    """Returns how many such rows the calls of `route` on this thread have computed so far."""
    return _COUNT.rows


def count_padding(rows: int) -> None:
    """Counts rows of a call that runs on this thread."""
    _COUNT.rows += rows
