"""Combines sets of pairs (query, key) by `and`, `or` and `not`, and counts them by a closed formula.

A region is a union of boxes (pair_boxes.py), and of tables (pair_tables.py) for data that is no box. Causal
masks, windows, prefixes, blocks, and what `and`, `or` and `not` make of them are regions. Blocks of two sizes
in one mask are none, unless one of the two decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import sympy

from .pair_boxes import Box
from .pair_tables import PairTable

_MOST_BOXES = 8
_MOST_COUNTED = 4
"""A count adds and subtracts the intersections of all sets of boxes, 2 to the power of their number."""
PairSet = Box | PairTable
Region = tuple[PairSet, ...]
EVERYTHING: Region = (Box(),)
NOTHING: Region = ()


def both(a: Region, b: Region) -> Region | None:
    """Returns the pairs in both regions; None if that takes too many boxes, or has no form."""
    found = [_joint(x, y) for x in a for y in b]
    return _kept(found)


def either(a: Region, b: Region) -> Region | None:
    """Returns the pairs in at least one region; None if that takes too many boxes."""
    return _kept([*a, *b])


def complement(region: Region) -> Region | None:
    """Returns the pairs that are not in a region; None if that takes too many boxes, or has no form."""
    found: Region | None = EVERYTHING
    for one in region:
        outside = _kept(one.outside())
        found = None if found is None or outside is None else both(found, outside)
    return found


def changed(region: Region, change: Callable[[PairSet], PairSet | None]) -> Region | None:
    """Returns a region whose sets were changed; None if one of them has no form then."""
    found = [change(one) for one in region]
    return None if any(one is None for one in found) else tuple(one for one in found if one is not None)


def count(region: Region, queries: Any, keys: Any) -> Any:
    """Returns the number of pairs of a region, of these numbers of queries and keys.

    It is a sympy expression. None if the region has too many boxes, or no formula.
    """
    if len(region) > _MOST_COUNTED:
        return None
    total = sympy.Integer(0)
    for size in range(1, len(region) + 1):
        for sets in combinations(region, size):
            joint: PairSet | None = sets[0]
            for one in sets[1:]:
                joint = None if joint is None else _joint(joint, one)
            number = None if joint is None else 0 if joint.is_empty else joint.count(queries, keys)
            if number is None:
                return None
            total += (-1) ** (size + 1) * number
    return sympy.expand(total)


def _joint(a: PairSet, b: PairSet) -> PairSet | None:
    """Returns the pairs in both sets; None if they have no form."""
    if isinstance(a, PairTable):
        return a.also(b) if isinstance(b, PairTable) else a.also_box(b)
    return b.also_box(a) if isinstance(b, PairTable) else a.also(b)


def _contains(a: PairSet, b: PairSet) -> bool:
    """Whether every pair of the second set is shown to be in the first."""
    if isinstance(a, Box):
        return a.contains(b) if isinstance(b, Box) else a.is_everything
    return isinstance(b, PairTable) and a.contains(b)


def _kept(sets: Sequence[PairSet | None]) -> Region | None:
    """Returns sets without those that are empty or inside another one; None if one is None."""
    found: list[PairSet] = []
    for one in sets:
        if one is None:
            return None
        if not one.is_empty and not any(_contains(f, one) for f in found):
            found = [f for f in found if not _contains(one, f)] + [one]
    return tuple(found) if len(found) <= _MOST_BOXES else None
