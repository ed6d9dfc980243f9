"""Holds sets of pairs (query, key) that are no boxes, as the data of a buffer gives them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .pair_boxes import Box, Range


@dataclass(frozen=True, eq=False)
class PairTable:
    """A set of pairs. inside: for each query and key whether the set has the pair, bool[queries, keys].

    A program reads no pair that is not in the table.
    """

    inside: Tensor

    def outside(self) -> list[PairTable]:
        """Returns the pairs that are not in the set."""
        return [PairTable(~self.inside)]

    def also(self, other: PairTable) -> PairTable | None:
        """Returns the pairs in both tables; None for tables of different sizes."""
        if self.inside.shape != other.inside.shape:
            return None
        return PairTable(self.inside & other.inside)

    def also_box(self, box: Box) -> PairTable | None:
        """Returns the pairs that are in a box too; None for a box whose bounds are not numbers."""
        if box.is_everything:
            return self
        if not all(b.is_number for b in box.bounds()):
            return None
        return PairTable(self.inside & pairs_of(box, *self.inside.shape))

    def contains(self, other: PairTable) -> bool:
        """Whether every pair of another table is in this one."""
        same = self.inside.shape == other.inside.shape
        return same and not bool((other.inside & ~self.inside).any())

    @property
    def is_empty(self) -> bool:
        """Whether the set has no pair."""
        return not bool(self.inside.any())

    @property
    def reads(self) -> set[int]:
        """The dims that the set depends on, from the end."""
        return {-2, -1}

    def moved(self, queries: Any, keys: Any) -> PairTable | None:
        """Returns the set after `queries` was added to i, and `keys` to j; None if that is not to leave the
        first ones out.
        """
        if not (queries.is_number and keys.is_number and queries <= 0 and keys <= 0):
            return None
        return PairTable(self.inside[-int(queries) :, -int(keys) :])

    def turned(self) -> PairTable:
        """Returns the set with queries and keys exchanged."""
        return PairTable(self.inside.mT)

    def of_first(self, dim: int) -> None:
        """Returns None: a row or column of a table has no form. As `Box.of_first`."""

    def count(self, queries: Any, keys: Any) -> Any:
        """Returns the number of pairs of the first queries and keys; None if these are not numbers."""
        if not (queries.is_number and keys.is_number):
            return None
        rows, columns = int(queries), int(keys)
        if rows > self.inside.shape[0] or columns > self.inside.shape[1]:
            return None
        return queries * 0 + int(self.inside[:rows, :columns].sum())


def pairs_of(box: Box, queries: int, keys: int) -> Tensor:
    """Returns for each pair whether it is in a box whose bounds are numbers: bool[queries, keys]."""
    i, j = torch.arange(queries)[:, None], torch.arange(keys)[None]
    found = torch.ones(queries, keys, dtype=torch.bool)
    for numbers, bounds in ((i - j, box.apart), (i, box.queries), (j, box.keys)):
        found &= _inside(numbers, bounds)
    if (grid := box.grid) is not None:
        rows = (i + int(grid.query_shift)).div(grid.queries, rounding_mode="floor")
        columns = (j + int(grid.key_shift)).div(grid.keys, rounding_mode="floor")
        found &= _inside(rows - columns, box.blocks)
    return found


def _inside(numbers: Tensor, bounds: Range) -> Tensor:
    found = torch.ones_like(numbers, dtype=torch.bool)
    if bounds.low is not None:
        found &= numbers >= int(bounds.low)
    if bounds.high is not None:
        found &= numbers < int(bounds.high)
    return found
