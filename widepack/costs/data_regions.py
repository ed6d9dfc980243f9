"""Describes pairs (query, key) that are given as data by a region: boxes if possible, else a table.

Tried in this order, each for the pairs and for all other pairs:

1. one box: a band of i - j, some queries, some keys, blocks on a diagonal, or what is in several of them;
2. a few boxes: the keys of each query are split into their runs, counted from the first key;
3. the same, counted from the last key;
4. two boxes: the pairs up to the diagonal, and those after it;
5. a table of the data.

A box is compared with all data, so a region has exactly the pairs that are given. Its bounds are found by its
edges: the first key of each query, and the one after its last key.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import sympy
import torch
from torch import Tensor

from .pair_boxes import Box, Grid, Range
from .pair_regions import Region, complement
from .pair_tables import PairTable

_MOST_RUNS = 3


def region_of(pairs: Tensor) -> Region:
    """Returns the region of the pairs that are true. pairs: bool[queries, keys]."""
    for sets, is_rest in ((pairs, False), (~pairs, True)):
        for parts in _splits(sets):
            boxes = [_box(part) for part in parts if part.any()]
            region: Region | None = tuple(box for box in boxes if box is not None)
            if region is not None and len(region) == len(boxes):
                region = complement(region) if is_rest else region
                if region is not None:
                    return region
    return (PairTable(pairs),)


def _splits(pairs: Tensor) -> Iterator[list[Tensor]]:
    """Yields ways to split pairs into parts."""
    yield [pairs]
    before = torch.zeros_like(pairs)
    before[:, 1:] = pairs[:, :-1]
    starts = pairs & ~before
    runs = starts.sum(1)
    most = int(runs.max())
    if 1 < most <= _MOST_RUNS:
        number = starts.cumsum(1, dtype=torch.int32)
        yield [pairs & (number == k) for k in range(1, most + 1)]
        number = runs.to(torch.int32)[:, None] - number
        yield [pairs & (number == k) for k in range(most)]
    yield [pairs.tril(), pairs.triu(1)]


@dataclass(frozen=True)
class _Edge:
    """The first key of each query, or the one after its last key. A box has both edges.

    key: a key that is the edge of all queries, or bounds it. apart: a bound of i - j. blocks: of the
    difference of their blocks. None: no such bound.
    """

    key: int | None
    apart: int | None
    blocks: int | None


def _box(pairs: Tensor) -> Box | None:
    """Returns the box that has exactly the pairs that are true, of which there is at least one; else None."""
    queries, keys = pairs.shape
    used = pairs.any(1).nonzero().flatten()
    begin, end = int(used[0]), int(used[-1]) + 1
    some, rows = pairs[begin:end], torch.arange(queries)
    numbers = some.to(torch.uint8)
    first, after = numbers.argmax(1), keys - numbers.flip(1).argmax(1)
    if len(used) < end - begin or not torch.equal(some.sum(1), after - first):
        return None
    size = _block_size(begin, first, after)
    low = _fitted(rows[begin:end], first, 0, True, size)
    high = _fitted(rows[begin:end], after, keys, False, size)
    if low is None or high is None:
        return None
    filled = _edge_of(high, rows, keys, False, size) > _edge_of(low, rows, 0, True, size)
    return Box(
        apart=_range(high.apart, low.apart),
        queries=_range(begin if filled[:begin].any() else None, end if filled[end:].any() else None),
        keys=_range(low.key, high.key),
        blocks=_range(high.blocks, low.blocks),
        grid=None if high.blocks is None and low.blocks is None else Grid(size, size),
    )


def _block_size(begin: int, first: Tensor, after: Tensor) -> int:
    """Returns the size of blocks that both edges allow, which begin at query `begin`; 0 for no blocks.

    From a query to the next an edge along a diagonal moves by one key or by none, an edge of blocks by more.
    """
    jumps = ((first.diff() > 1) | (after.diff() > 1)).nonzero().flatten().tolist()
    return math.gcd(*(begin + j + 1 for j in jumps))


def _fitted(rows: Tensor, edge: Tensor, end: int, is_first: bool, size: int) -> _Edge | None:
    """Returns the fewest bounds that give an edge; None if no bounds do.

    edge: of these rows. end: the edge without bounds. is_first: whether it is the first key, or the one after
    the last. size: of a block, or 0.
    """
    apart = rows - edge + 1
    own = (edge.min(), apart.max()) if is_first else (edge.max(), apart.min())
    bounds: list[tuple[int | None, ...]] = [(None, int(n)) for n in own]
    if size > 1:
        numbers = rows // size - (edge if is_first else edge - 1) // size
        bounds.append((None, int(numbers.max()) + 1 if is_first else int(numbers.min())))
    else:
        bounds.append((None,))
    for found in sorted(product(*bounds), key=lambda one: sum(n is not None for n in one)):
        if torch.equal(_edge_of(_Edge(*found), rows, end, is_first, size), edge):
            return _Edge(*found)
    return None


def _edge_of(bounds: _Edge, rows: Tensor, end: int, is_first: bool, size: int) -> Tensor:
    """Returns the edge of each row that bounds give. end, is_first, size: as `_fitted` takes them."""
    found = torch.full_like(rows, end)
    join = torch.maximum if is_first else torch.minimum
    if bounds.key is not None:
        found = join(found, torch.full_like(rows, bounds.key))
    if bounds.apart is not None:
        found = join(found, rows - bounds.apart + 1)
    if bounds.blocks is not None:
        found = join(found, size * (rows // size - bounds.blocks + 1))
    return found


def _range(low: int | None, high: int | None) -> Range:
    return Range(*(None if n is None else sympy.Integer(n) for n in (low, high)))
