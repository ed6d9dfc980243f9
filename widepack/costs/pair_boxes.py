"""Describes a set of pairs (query, key) by inequalities, and counts it by a closed formula.

A pair is a query i and a key j. A box is the set of all pairs with

    i - j in [.., ..)    i in [.., ..)    j in [.., ..)
    (i + query_shift) // queries - (j + key_shift) // keys in [.., ..)

Bounds and shifts are sympy expressions over the dims, or None for no bound. The sizes of blocks are numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import sympy
from torch.utils._sympy.functions import FloorDiv

from .block_sums import Stairs, at_least, pairs_below

_ZERO = sympy.Integer(0)
Bound = Any  # a sympy expression, or None


@dataclass(frozen=True)
class Range:
    """The numbers from `low` on and below `high`."""

    low: Bound = None
    high: Bound = None

    def also(self, other: Range) -> Range:
        """Returns the numbers in both ranges."""
        return Range(_joined(sympy.Max, self.low, other.low), _joined(sympy.Min, self.high, other.high))

    def moved(self, by: Any) -> Range:
        """Returns the range of the numbers plus `by`."""
        return Range(
            None if self.low is None else self.low + by, None if self.high is None else self.high + by
        )

    def opposite(self) -> Range:
        """Returns the range of the numbers times -1."""
        return Range(None if self.high is None else 1 - self.high, None if self.low is None else 1 - self.low)

    def outside(self) -> list[Range]:
        """Returns the numbers below and from the end on."""
        below = [] if self.low is None else [Range(None, self.low)]
        return below + ([] if self.high is None else [Range(self.high, None)])

    def contains(self, other: Range) -> bool:
        """Whether every number of another range is shown to be in this one."""
        return (self.low is None or (other.low is not None and at_least(other.low, self.low))) and (
            self.high is None or (other.high is not None and at_least(self.high, other.high))
        )

    @property
    def is_empty(self) -> bool:
        """Whether the range is shown to have no number."""
        return self.low is not None and self.high is not None and at_least(self.low, self.high)


@dataclass(frozen=True)
class Grid:
    """Blocks of queries and blocks of keys, each with a number.

    queries, keys: the size of a block. query_shift, key_shift: added to i and to j before the division.
    """

    queries: int
    keys: int
    query_shift: Any = _ZERO
    key_shift: Any = _ZERO

    @property
    def is_square(self) -> bool:
        """Whether a block of queries is as large as a block of keys."""
        return self.queries == self.keys

    def moved(self, queries: Any, keys: Any) -> Grid:
        """Returns the grid after `queries` was added to i, and `keys` to j."""
        query_shift, key_shift = (
            sympy.expand(a - b) for a, b in ((self.query_shift, queries), (self.key_shift, keys))
        )
        return replace(self, query_shift=query_shift, key_shift=key_shift)

    def turned(self) -> Grid:
        """Returns the grid with queries and keys exchanged."""
        return Grid(self.keys, self.queries, self.key_shift, self.query_shift)

    def pairs_apart(self, blocks: Range) -> Range:
        """Returns a range of i - j that has all pairs whose blocks are this far apart."""
        if not self.is_square:
            return Range()
        low, high = blocks.low, blocks.high
        found = Range(
            None if low is None else self.queries * (low - 1) + 1,
            None if high is None else self.queries * high,
        )
        return found.moved(self.key_shift - self.query_shift)

    def blocks_apart(self, pairs: Range) -> Range:
        """Returns a range of the differences of blocks that has all pairs with i - j in a range."""
        if not self.is_square:
            return Range()
        moved = pairs.moved(self.query_shift - self.key_shift)
        return Range(
            None if moved.low is None else FloorDiv(moved.low, self.queries),
            None if moved.high is None else FloorDiv(moved.high - 2, self.queries) + 2,
        )


@dataclass(frozen=True)
class Box:
    """A set of pairs. apart: the range of i - j. queries: of i. keys: of j. blocks: of the difference of
    their blocks in `grid`; a box without bounds of blocks has no grid.
    """

    apart: Range = Range()
    queries: Range = Range()
    keys: Range = Range()
    blocks: Range = Range()
    grid: Grid | None = None

    @classmethod
    def of_blocks(cls, blocks: Range, grid: Grid) -> Box:
        """Returns the pairs whose blocks are this far apart, in the usual form: the number in a shift is
        below the size of a block.
        """
        query_shift, key_shift = (sympy.expand(s) for s in (grid.query_shift, grid.key_shift))
        if grid.queries == grid.keys == 1:
            return cls(apart=blocks.moved(key_shift - query_shift))
        rows = query_shift.as_coeff_Add()[0] // grid.queries
        columns = key_shift.as_coeff_Add()[0] // grid.keys
        usual = replace(
            grid, query_shift=query_shift - rows * grid.queries, key_shift=key_shift - columns * grid.keys
        )
        return cls(blocks=blocks.moved(columns - rows), grid=usual)

    @property
    def is_everything(self) -> bool:
        """Whether the box has no bounds."""
        return self == Box()

    @property
    def reads(self) -> set[int]:
        """The dims that the box depends on, from the end: -2 for queries, -1 for keys."""
        found = {-2, -1} if self.apart != Range() or self.blocks != Range() else set()
        found |= {-2} if self.queries != Range() else set()
        return found | ({-1} if self.keys != Range() else set())

    def also(self, other: Box) -> Box | None:
        """Returns the pairs in both boxes.

        None if the boxes have different grids, and it is not shown that one is inside the other, or that they
        have no pair in common.
        """
        queries, keys = self.queries.also(other.queries), self.keys.also(other.keys)
        if self.grid is None or other.grid is None or self.grid == other.grid:
            apart, blocks = self.apart.also(other.apart), self.blocks.also(other.blocks)
            return Box(apart, queries, keys, blocks, self.grid or other.grid)
        common = Box(self._all_apart().also(other._all_apart()), queries, keys)
        if common.is_empty:
            return common
        return other if self.contains(other) else self if other.contains(self) else None

    def outside(self) -> list[Box]:
        """Returns boxes that together have all pairs which are not in this one."""
        boxes = [Box(apart=r) for r in self.apart.outside()]
        boxes += [Box(queries=r) for r in self.queries.outside()]
        boxes += [Box(keys=r) for r in self.keys.outside()]
        return boxes + [Box(blocks=r, grid=self.grid) for r in self.blocks.outside()]

    def contains(self, other: Box) -> bool:
        """Whether every pair of another box is shown to be in this one."""
        ranges = ((self.queries, other.queries), (self.keys, other.keys))
        apart = other._all_apart()
        if not self.apart.contains(apart) or not all(a.contains(b) for a, b in ranges):
            return False
        if self.grid is None:
            return True
        blocks = self.grid.blocks_apart(apart)
        return self.blocks.contains(blocks.also(other.blocks) if self.grid == other.grid else blocks)

    @property
    def is_empty(self) -> bool:
        """Whether the box is shown to have no pair."""
        apart = self._all_apart()
        blocks = self.blocks if self.grid is None else self.blocks.also(self.grid.blocks_apart(apart))
        return any(r.is_empty for r in (apart, self.queries, self.keys, blocks))

    def moved(self, queries: Any, keys: Any) -> Box:
        """Returns the box after `queries` was added to i, and `keys` to j."""
        moved = Box(self.apart.moved(queries - keys), self.queries.moved(queries), self.keys.moved(keys))
        if self.grid is None:
            return moved
        blocks = Box.of_blocks(self.blocks, self.grid.moved(queries, keys))
        return replace(moved, blocks=blocks.blocks, grid=blocks.grid)

    def turned(self) -> Box:
        """Returns the box with queries and keys exchanged."""
        grid = None if self.grid is None else self.grid.turned()
        return Box(self.apart.opposite(), self.keys, self.queries, self.blocks.opposite(), grid)

    def of_first(self, dim: int) -> Box | None:
        """Returns the pairs whose query, or key, could be the first one instead: a box that does not read it.

        dim: -2 for the query, -1 for the key. None if the first one may be in the box or not.
        """
        if dim == -1:
            turned = self.turned().of_first(-2)
            return None if turned is None else turned.turned()
        first = Range(_ZERO, sympy.Integer(1))
        if first.also(self.queries).is_empty:
            return Box(keys=Range(_ZERO, _ZERO))
        if not self.queries.contains(first):
            return None
        keys = self.keys.also(self.apart.opposite())
        if (grid := self.grid) is not None:
            blocks = self.blocks.opposite().moved(FloorDiv(grid.query_shift, grid.queries))
            ends = (None if n is None else grid.keys * n for n in (blocks.low, blocks.high))
            keys = keys.also(Range(*ends).moved(-grid.key_shift))
        return Box(keys=keys)

    def bounds(self) -> Iterator[Any]:
        """Yields all expressions of the box."""
        for r in (self.apart, self.queries, self.keys, self.blocks):
            yield from (b for b in (r.low, r.high) if b is not None)
        if self.grid is not None:
            yield from (self.grid.query_shift, self.grid.key_shift)

    def count(self, queries: Any, keys: Any) -> Any:
        """Returns the number of pairs, of these numbers of queries and keys.

        None if the box bounds both i - j and blocks whose numbers of queries and keys differ. Every bound is
        an upper or a lower edge of the keys of a query. The pairs are those below the upper edges, without
        those below one of the lower edges.
        """
        if self.grid is not None and not self.grid.is_square and self.apart != Range():
            return None
        rows, columns = (
            Range(_ZERO, size).also(r) for size, r in ((queries, self.queries), (keys, self.keys))
        )
        height, width = (sympy.Max(0, r.high - r.low) for r in (rows, columns))

        def below(apart: Bound, blocks: Bound) -> Any:
            line = None if apart is None else rows.low - columns.low - apart + 1
            return pairs_below(height, width, line, self._stairs(blocks, rows.low, columns.low))

        apart, blocks = self.apart, self.blocks
        next_apart, next_blocks = (
            r.high if r.low is None or r.high is None or at_least(r.high, r.low) else sympy.Max(r.low, r.high)
            for r in (apart, blocks)
        )
        found = below(apart.low, blocks.low)
        if next_apart is not None:
            found -= below(next_apart, blocks.low)
        if next_blocks is not None:
            found -= below(apart.low, next_blocks)
        if next_apart is not None and next_blocks is not None:
            found += below(next_apart, next_blocks)
        return found

    def _stairs(self, least: Bound, row: Any, column: Any) -> Stairs | None:
        """Returns the edge of the keys whose blocks are at least so far before that of the query.

        row, column: the query and the key from which rows and columns are counted.
        """
        if least is None or self.grid is None:
            return None
        grid = self.grid
        start, offset = row + grid.query_shift, grid.keys * (1 - least) - grid.key_shift - column
        return Stairs(grid.queries, grid.keys, sympy.expand(start), sympy.expand(offset))

    def _all_apart(self) -> Range:
        """Returns the range of i - j, also as far as the blocks bound it."""
        return self.apart if self.grid is None else self.apart.also(self.grid.pairs_apart(self.blocks))


def _joined(function: Any, a: Bound, b: Bound) -> Bound:
    return a if b is None else b if a is None else function(a, b)
