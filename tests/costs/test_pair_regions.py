"""Tests the counts of pairs of query and key against pairs that are counted one by one."""

from __future__ import annotations

import random
from itertools import product

import pytest
import sympy

from widepack.costs.pair_boxes import Box, Range
from widepack.costs.pair_regions import (
    EVERYTHING,
    NOTHING,
    Region,
    both,
    complement,
    count,
    either,
)

T, S = (sympy.Symbol(name, integer=True, positive=True) for name in "TS")
SIZES = [(1, 1), (1, 6), (6, 1), (5, 5), (4, 9), (9, 4), (12, 12)]


def inside(box: Box, i: int, j: int, sizes: dict[sympy.Symbol, int]) -> bool:
    def has(r: Range, n: int) -> bool:
        low, high = (None if b is None else sympy.sympify(b).subs(sizes) for b in (r.low, r.high))
        return (low is None or n >= low) and (high is None or n < high)

    return has(box.apart, i - j) and has(box.queries, i) and has(box.keys, j)


def by_hand(region: Region, queries: int, keys: int) -> int:
    sizes = {T: queries, S: keys}
    pairs = product(range(queries), range(keys))
    boxes = [box for box in region if isinstance(box, Box)]
    assert len(boxes) == len(region)
    return sum(any(inside(box, i, j, sizes) for box in boxes) for i, j in pairs)


def box(apart: tuple[object, object] = (None, None), keys: tuple[object, object] = (None, None)) -> Box:
    numbers = [None if n is None else sympy.sympify(n) for n in (*apart, *keys)]
    return Box(Range(*numbers[:2]), keys=Range(*numbers[2:]))


CAUSAL = (box((0, None)),)
REGIONS: dict[str, Region] = {
    "all": EVERYTHING,
    "none": NOTHING,
    "causal": CAUSAL,
    "window": (box((0, 3)),),
    "both sides": (box((-2, 3)),),
    "ahead": (box((None, 0)),),
    "prefix": (box(keys=(None, 3)), *CAUSAL),
    "window and first key": (box((0, 3)), box((0, None), (None, 1))),
    "cross": (box((T - S, None)),),
    "last keys": (box((0, None), (S - 2, None)),),
    "no pair": (box((4, 2)),),
    "half": (box(keys=(None, sympy.Max(1, S - 3))), box((0, T))),
}


@pytest.mark.parametrize("name", REGIONS)
def test_counts_equal_those_by_hand(name: str) -> None:
    region = REGIONS[name]
    formula, rest = count(region, T, S), complement(region)
    assert rest is not None
    others = count(rest, T, S)
    for queries, keys in SIZES:
        at = {T: queries, S: keys}
        assert formula.subs(at) == by_hand(region, queries, keys), (queries, keys)
        assert others is None or others.subs(at) == queries * keys - by_hand(region, queries, keys)


def test_random_unions_and_intersections() -> None:
    drawn = random.Random(0)

    def some(low: int, high: int) -> Range:
        a, b = (drawn.choice([None, sympy.Integer(drawn.randint(low, high))]) for _ in range(2))
        return Range(a, b)

    checked = 0
    for _ in range(60):
        first, second = ((Box(some(-6, 6), some(0, 7), some(0, 7)),) for _ in range(2))
        for region, join in ((both(first, second), all), (either(first, second), any)):
            assert region is not None
            for queries, keys in ((5, 5), (3, 8)):
                pairs = product(range(queries), range(keys))
                wanted = sum(join(inside(b[0], i, j, {}) for b in (first, second)) for i, j in pairs)
                assert count(region, sympy.Integer(queries), sympy.Integer(keys)) == wanted
                checked += wanted
    assert checked > 0


def test_causal_masks_have_the_usual_formula() -> None:
    assert sympy.factor(count(CAUSAL, T, T)) == T * (T + 1) / 2


def test_exchanged_and_moved_boxes() -> None:
    band = box((-1, 3), (2, 5))
    for i, j in product(range(8), range(8)):
        assert inside(band.turned(), j, i, {}) == inside(band, i, j, {})
        assert inside(band.moved(sympy.Integer(2), sympy.Integer(-1)), i + 2, j - 1, {}) == inside(
            band, i, j, {}
        )
