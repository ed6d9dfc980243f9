"""Evaluates counts of pairs at many sizes at once, and counts the pairs of real masks at these sizes."""

from __future__ import annotations

from functools import reduce
from typing import Any

import sympy
import torch
from torch import Tensor

from widepack.costs.expressions import World
from widepack.costs.mask_values import Mask
from widepack.costs.pair_boxes import Box, Grid, Range
from widepack.costs.pair_regions import Region
from widepack.costs.pair_tables import PairTable, pairs_of
from widepack_artifacts.formulas import Formula

MOST = 200
T, S = (sympy.Symbol(name, integer=True, positive=True) for name in "TS")


def at_all_sizes(count: Any) -> Tensor:
    """Returns a count at T, S from 1 to 200, as int64[200, 200].

    The text of the formula is evaluated for all sizes at once, and by the reader of formulas for some.
    """
    text = World({}, torch.float32).text(sympy.expand(2 * count))  # a count alone may have halves of numbers
    sizes = torch.arange(1, MOST + 1)
    joins: dict[str, Any] = {
        "min": lambda *parts: reduce(torch.minimum, map(torch.as_tensor, parts)),
        "max": lambda *parts: reduce(torch.maximum, map(torch.as_tensor, parts)),
    }
    twice = torch.as_tensor(eval(text, joins, {"T": sizes[:, None], "S": sizes[None]})).expand(MOST, MOST)
    for t, s in ((1, 1), (2, 7), (33, 32), (64, 200), (191, 5)):
        assert Formula(text).at({"T": t, "S": s}) == int(twice[t - 1, s - 1])
    assert not (twice % 2).any()
    return twice // 2


def of_all_sizes(pairs: Tensor) -> Tensor:
    """Returns the number of true pairs of the first T queries and S keys, for T, S from 1 to 200.

    pairs: bool[200, 200], a mask that does not depend on T and S.
    """
    return pairs.long().cumsum(0).cumsum(1)


def inside(region: Region, queries: int, keys: int) -> Tensor:
    """Returns for each pair whether it is in a region at these sizes, as bool[queries, keys]."""
    found = torch.zeros(queries, keys, dtype=torch.bool)
    for one in region:
        if isinstance(one, PairTable):
            found |= one.inside[:queries, :keys]
        else:
            found |= pairs_of(_at(one, queries, keys), queries, keys)
    return found


def agrees(known: Mask, mask: Tensor) -> bool:
    """Whether what is known of a mask holds for it, and is all of it. mask: bool[queries, keys]."""
    sure, possible = (inside(region, *mask.shape) for region in (known.sure, known.possible))
    assert not (sure & ~mask).any() and not (mask & ~possible).any()
    return torch.equal(sure, possible)


def _at(box: Box, queries: int, keys: int) -> Box:
    def number(bound: Any) -> Any:
        return None if bound is None else sympy.sympify(bound).subs({T: queries, S: keys})

    apart, rows, columns, blocks = (
        Range(number(r.low), number(r.high)) for r in (box.apart, box.queries, box.keys, box.blocks)
    )
    grid = box.grid and Grid(
        box.grid.queries, box.grid.keys, number(box.grid.query_shift), number(box.grid.key_shift)
    )
    return Box(apart, rows, columns, blocks, grid)
