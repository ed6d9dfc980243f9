"""Groups the rows of a call by member, and puts answers back in the order of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..rows.layout import RowAxis


@dataclass(frozen=True)
class RowGroups:
    """The rows of a call by member.

    members: The members that have rows, in the order of their first row. rows: The rows of each. whole:
    Whether the rows of each member follow each other already.
    """

    members: list[int]
    rows: list[list[int]]
    whole: bool

    @classmethod
    def of(cls, numbers: Sequence[int]) -> RowGroups:
        """Groups rows. numbers: the number of the member of each row."""
        rows: dict[int, list[int]] = {}
        for row, number in enumerate(numbers):
            rows.setdefault(number, []).append(row)
        found = list(rows.values())
        return cls(list(rows), found, all(r[-1] - r[0] == len(r) - 1 for r in found))

    @cached_property
    def order(self) -> Tensor:
        """The rows, member after member."""
        return torch.tensor([row for rows in self.rows for row in rows], device="cpu")

    @cached_property
    def inverse(self) -> Tensor:
        """For each row its place in `order`."""
        found = torch.empty_like(self.order)
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
        count = sum(sizes)
        front, back, places = (
            value.shape[: axis.dim],
            value.shape[axis.dim + 1 :],
            value.shape[axis.dim] // count,
        )
        before = 1 if axis.before == 1 else places if axis.after == 1 else axis.before
        apart = value.reshape(*front, before, count, places // before, *back)
        if not self.whole:
            apart = apart.index_select(axis.dim + 1, self.order.to(value.device))
        return [p.flatten(axis.dim, axis.dim + 2) for p in torch.split(apart, sizes, axis.dim + 1)]

    def join(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """Returns the answers of all groups in the order of the rows. dim: where the rows are."""
        joined = torch.cat(list(parts), dim)
        return joined if self.whole else joined.index_select(dim, self.inverse.to(joined.device))
