"""Tests counts of pairs of blocks at all sizes from 1 to 200, and what is known of masks that are drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pair_counts import MOST, S, T, agrees, at_all_sizes, inside, of_all_sizes
from torch import Tensor

from widepack.costs.expressions import World
from widepack.costs.mask_indices import Index
from widepack.costs.mask_values import Constant, Distance, Mask, compared
from widepack.costs.pair_boxes import Box, Grid, Range
from widepack.costs.pair_regions import both, complement, count, either

ZERO, ONE = sympy.Integer(0), sympy.Integer(1)
QUERY, KEY = Index((ONE, ZERO)), Index((ZERO, ONE))
Draw = Callable[..., Any]


def over(index: Index, size: int) -> Index:
    found = index.divided(size)
    assert found is not None
    return found


def masks_of_blocks(b: int, number: Callable[[str], Any]) -> dict[str, Any]:
    """Returns masks over blocks of b, either of regions or of real numbers."""
    i, j, rows, columns = (number(name) for name in ("i", "j", "rows", "columns"))
    same, causal, behind = rows.eq(columns), i.ge(j), rows.ge(columns)
    window = causal.also(i.less(j, b // 2 + 2))
    return {
        "same block": same,
        "block-causal": behind,
        "block window": rows.near(columns, 1),
        "block window of three": rows.near(columns, 3).also(behind),
        "causal in blocks": same.also(causal),
        "window in blocks": same.also(window),
        "window in two blocks": rows.near(columns, 1).also(window),
        "window or block": window.either(same),
        "prefix or block": j.below(3).either(same),
        "block-causal or prefix": behind.either(j.below(2 * b + 1)),
        "not block-causal, in a window": behind.opposite().also(i.near(j, b + 1)),
        "other blocks before": same.opposite().also(causal),
        "some queries of blocks": same.also(i.below(b + 2)),
        "other queries and keys of blocks": behind.also(i.below(3).opposite()).also(j.below(b + 2)),
    }


class Known:
    """Whole numbers of an `Index`, with the comparisons that `masks_of_blocks` needs."""

    def __init__(self, index: Index) -> None:
        self.index = index

    def eq(self, other: Known) -> Mask:
        return compared("eq", self.index, other.index)

    def ge(self, other: Known) -> Mask:
        return compared("ge", self.index, other.index)

    def less(self, other: Known, by: int) -> Mask:
        return compared("lt", self.index.combined(other.index, -1), Constant(by))

    def near(self, other: Known, by: int) -> Mask:
        return compared("le", Distance(self.index.combined(other.index, -1)), Constant(by))

    def below(self, number: int) -> Mask:
        return compared("lt", self.index, Constant(number))


class Real:
    """The same for real numbers. mask: the result of a comparison."""

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers

    def eq(self, other: Real) -> RealMask:
        return RealMask(self.numbers == other.numbers)

    def ge(self, other: Real) -> RealMask:
        return RealMask(self.numbers >= other.numbers)

    def less(self, other: Real, by: int) -> RealMask:
        return RealMask(self.numbers - other.numbers < by)

    def near(self, other: Real, by: int) -> RealMask:
        return RealMask((self.numbers - other.numbers).abs() <= by)

    def below(self, number: int) -> RealMask:
        return RealMask(self.numbers < number)


class RealMask:
    """Booleans with the methods of `Mask`."""

    def __init__(self, pairs: Tensor) -> None:
        self.pairs = pairs

    def also(self, other: RealMask) -> RealMask:
        return RealMask(self.pairs & other.pairs)

    def either(self, other: RealMask) -> RealMask:
        return RealMask(self.pairs | other.pairs)

    def opposite(self) -> RealMask:
        return RealMask(~self.pairs)


@pytest.mark.parametrize("b", [2, 3, 8, 64, 201])
def test_blocks_are_counted_at_all_sizes(b: int) -> None:
    i, j = torch.arange(MOST)[:, None], torch.arange(MOST)[None]
    numbers = {"i": i, "j": j, "rows": i // b, "columns": j // b}
    indices = {"i": QUERY, "j": KEY, "rows": over(QUERY, b), "columns": over(KEY, b)}
    known = masks_of_blocks(b, lambda name: Known(indices[name]))
    real = masks_of_blocks(b, lambda name: Real(numbers[name]))
    for name, mask in known.items():
        assert mask.sure == mask.possible, name
        wanted = of_all_sizes(real[name].pairs.expand(MOST, MOST))
        formula = count(mask.sure, T, S)
        assert formula is not None, name
        assert torch.equal(at_all_sizes(formula), wanted), name
        rest = complement(mask.sure)
        others = None if rest is None else count(rest, T, S)
        if others is not None:
            assert torch.equal(at_all_sizes(T * S - others), wanted), name


def test_the_usual_formulas_of_blocks_are_short() -> None:
    same, behind = (compared(name, over(QUERY, 64), over(KEY, 64)).sure for name in ("eq", "ge"))
    texts = [World({}, torch.float32).text(2 * count(region, T, T)) for region in (same, behind)]
    assert texts == [
        "2*(4096*((T//64)) + ((T % 64))**2)",
        "2*(T*((T % 64)) + 2048*((T//64))**2 + 2048*((T//64)))",
    ]


SHIFTS = st.sampled_from([0, 0, 1, 5, -8, -15]).map(sympy.Integer)
BOUNDS = st.none() | st.integers(-5, 7).map(sympy.Integer)
RANGES = st.builds(Range, BOUNDS, BOUNDS)
SIDES = RANGES | st.just(Range())


@st.composite
def boxes(draw: Draw) -> Box:
    size = draw(st.integers(1, 9))
    other = draw(st.sampled_from([size, size, draw(st.integers(1, 9))]))
    blocks = Box.of_blocks(draw(RANGES), Grid(size, other, draw(SHIFTS), draw(SHIFTS)))
    found = blocks.also(Box(draw(SIDES), draw(SIDES), draw(SIDES)))
    assert found is not None
    return found


@settings(max_examples=60, deadline=None)
@given(boxes(), st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=4, max_size=4))
def test_drawn_boxes(box: Box, sizes: list[tuple[int, int]]) -> None:
    for t, s in sizes:
        pairs, number = inside((box,), t, s), box.count(sympy.Integer(t), sympy.Integer(s))
        if number is None:
            assert box.apart != Range() and box.grid is not None and not box.grid.is_square
        else:
            assert number == int(pairs.sum())
        assert not (box.is_empty and pairs.any())
        assert torch.equal(inside((box.turned(),), s, t), pairs.mT)


@settings(max_examples=60, deadline=None)
@given(boxes(), boxes(), st.integers(1, 24), st.integers(1, 24))
def test_drawn_unions(a: Box, b: Box, t: int, s: int) -> None:
    first, second = (inside((box,), t, s) for box in (a, b))
    for region, wanted in (
        (both((a,), (b,)), first & second),
        (either((a,), (b,)), first | second),
        (complement((a,)), ~first),
        (complement((a, b)), ~(first | second)),
    ):
        if region is not None:
            assert torch.equal(inside(region, t, s), wanted)
            number = count(region, sympy.Integer(t), sympy.Integer(s))
            assert number is None or number == int(wanted.sum())
    assert a.contains(b) <= (not (second & ~first).any())


ORDERS = ("ge", "gt", "le", "lt")
TERMS = st.tuples(st.integers(-3, 3), st.integers(1, 7), st.integers(-6, 6))
"""factor * ((index + shift) // by)"""


@settings(max_examples=150, deadline=None)
@given(TERMS, TERMS, st.integers(-9, 9), st.sampled_from([*ORDERS, "eq", "ne"]))
def test_drawn_comparisons(
    row: tuple[int, int, int], column: tuple[int, int, int], number: int, name: str
) -> None:
    def terms(index: Any, divide: Callable[[Any, int], Any], plus: Callable[[Any, int], Any]) -> list[Any]:
        return [(f, divide(plus(x, c), by)) for x, (f, by, c) in zip(index, (row, column))]

    (a, left), (b, right) = terms((QUERY, KEY), over, lambda x, c: x.combined(Index((), sympy.Integer(c)), 1))
    known = compared(name, left.times(a).combined(right.times(b), 1), Constant(number))
    i, j = torch.arange(23)[:, None], torch.arange(31)[None]
    (a, rows), (b, columns) = terms(
        (i, j), lambda x, by: x.div(by, rounding_mode="floor"), lambda x, c: x + c
    )
    mask = getattr(a * rows + b * columns, name)(number).expand(23, 31)
    exact = agrees(known, mask)
    if a * b <= 0 and (max(abs(a), abs(b)) == 1 or (min(abs(a), abs(b)) == 1 and name in ORDERS)):
        assert exact
