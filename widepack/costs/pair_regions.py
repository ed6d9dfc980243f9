"""Describes sets of pairs (query, key) by inequalities, and counts them by a closed formula.

A pair is a query i and a key j. A box is the set of all pairs with

    i - j in [.., ..)    i in [.., ..)    j in [.., ..)

and a region is a union of boxes. Bounds are sympy expressions over the dims, or None for no bound. Causal
masks, windows, prefixes, and what `and`, `or` and `not` make of them are regions. Masks of other shapes have
none, for example blocks on a diagonal.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Any

import sympy

_MOST_BOXES = 8
_MOST_COUNTED = 4
"""A count adds and subtracts the intersections of all sets of boxes, 2 to the power of their number."""
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

    def outside(self) -> list[Range]:
        """Returns the numbers below and from the end on."""
        below = [] if self.low is None else [Range(None, self.low)]
        return below + ([] if self.high is None else [Range(self.high, None)])

    def contains(self, other: Range) -> bool:
        """Whether every number of another range is shown to be in this one."""
        return (self.low is None or (other.low is not None and _at_least(other.low, self.low))) and (
            self.high is None or (other.high is not None and _at_least(self.high, other.high))
        )

    @property
    def is_empty(self) -> bool:
        """Whether the range is shown to have no number."""
        return self.low is not None and self.high is not None and _at_least(self.low, self.high)


@dataclass(frozen=True)
class Box:
    """A set of pairs. apart: the range of i - j. queries: of i. keys: of j."""

    apart: Range = Range()
    queries: Range = Range()
    keys: Range = Range()

    @property
    def ranges(self) -> tuple[Range, Range, Range]:
        """The three ranges."""
        return self.apart, self.queries, self.keys

    def also(self, other: Box) -> Box:
        """Returns the pairs in both boxes."""
        return Box(*(a.also(b) for a, b in zip(self.ranges, other.ranges)))

    def outside(self) -> list[Box]:
        """Returns boxes that together have all pairs which are not in this one."""
        boxes = [Box(apart=r) for r in self.apart.outside()]
        boxes += [Box(queries=r) for r in self.queries.outside()]
        return boxes + [Box(keys=r) for r in self.keys.outside()]

    def contains(self, other: Box) -> bool:
        """Whether every pair of another box is shown to be in this one."""
        return all(a.contains(b) for a, b in zip(self.ranges, other.ranges))

    @property
    def is_empty(self) -> bool:
        """Whether the box is shown to have no pair."""
        return any(r.is_empty for r in self.ranges)

    def moved(self, queries: Any, keys: Any) -> Box:
        """Returns the box after `queries` was added to i, and `keys` to j."""
        return Box(self.apart.moved(queries - keys), self.queries.moved(queries), self.keys.moved(keys))

    def turned(self) -> Box:
        """Returns the box with queries and keys exchanged."""
        low, high = self.apart.low, self.apart.high
        apart = Range(None if high is None else 1 - high, None if low is None else 1 - low)
        return Box(apart, self.keys, self.queries)

    def count(self, queries: Any, keys: Any) -> Any:
        """Returns the number of pairs, of these numbers of queries and keys."""
        rows, columns = (
            Range(_ZERO, size).also(r) for size, r in ((queries, self.queries), (keys, self.keys))
        )
        counts = [sympy.Max(0, r.high - r.low) for r in (rows, columns)]
        apart = self.apart.moved(columns.low - rows.low)
        below = _ZERO if apart.high is None else _at_or_above(apart.high, *counts)
        found = counts[0] * counts[1] if apart.low is None else _at_or_above(apart.low, *counts)
        sure = apart.low is None or apart.high is None or _at_least(apart.high, apart.low)
        return found - below if sure else sympy.Max(0, found - below)


Region = tuple[Box, ...]
EVERYTHING: Region = (Box(),)
NOTHING: Region = ()


def both(a: Region, b: Region) -> Region | None:
    """Returns the pairs in both regions; None if that takes too many boxes."""
    return _kept([x.also(y) for x in a for y in b])


def either(a: Region, b: Region) -> Region | None:
    """Returns the pairs in at least one region; None if that takes too many boxes."""
    return _kept([*a, *b])


def complement(region: Region) -> Region | None:
    """Returns the pairs that are not in a region; None if that takes too many boxes."""
    found: Region | None = EVERYTHING
    for box in region:
        outside = _kept(box.outside())
        found = None if found is None or outside is None else both(found, outside)
    return found


def count(region: Region, queries: Any, keys: Any) -> Any:
    """Returns the number of pairs of a region, of these numbers of queries and keys.

    It is a sympy expression. None if the region has too many boxes.
    """
    if len(region) > _MOST_COUNTED:
        return None
    total = _ZERO
    for size in range(1, len(region) + 1):
        for boxes in combinations(region, size):
            joint = boxes[0]
            for box in boxes[1:]:
                joint = joint.also(box)
            if not joint.is_empty:
                total += (-1) ** (size + 1) * joint.count(queries, keys)
    return sympy.expand(total)


def _kept(boxes: list[Box]) -> Region | None:
    """Returns boxes without those that are empty or inside another one."""
    found: list[Box] = []
    for box in boxes:
        if not box.is_empty and not any(f.contains(box) for f in found):
            found = [f for f in found if not box.contains(f)] + [box]
    return tuple(found) if len(found) <= _MOST_BOXES else None


def _at_or_above(least: Any, rows: Any, columns: Any) -> Any:
    """Returns the number of pairs of rows and columns, both counted from 0, with `i - j >= least`.

    Row i has min(columns, i - least + 1) such pairs if that is positive. The sum over all rows is a sum over
    u = i - least + 1, from 1 - least to rows - least.
    """
    return _sum_to(rows - least, columns) - _sum_to(-least, columns)


def _sum_to(last: Any, most: Any) -> Any:
    """Returns the sum of min(most, u) over u from 1 to `last`."""
    return _triangle(last) - _triangle(last - most)


def _triangle(n: Any) -> Any:
    positive = sympy.Max(0, n)
    return positive * (positive + 1) / 2


def _at_least(a: Any, b: Any) -> bool:
    return bool(sympy.expand(a - b).is_nonnegative)


def _joined(function: Any, a: Bound, b: Bound) -> Bound:
    return a if b is None else b if a is None else function(a, b)
