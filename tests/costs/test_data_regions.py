"""Tests which regions are found in the data of masks, and what is known of weights from their data."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pair_counts import inside
from torch import Tensor

from widepack.costs.data_regions import region_of
from widepack.costs.mask_data import known_of
from widepack.costs.mask_values import Bias, Constant, Mask
from widepack.costs.pair_boxes import Box
from widepack.costs.pair_regions import EVERYTHING, NOTHING, both, complement, count
from widepack.costs.pair_tables import PairTable

INF = float("inf")
Pairs = Callable[[Tensor, Tensor], Tensor]

USUAL: dict[str, Pairs] = {
    "causal": lambda i, j: j <= i,
    "strictly causal": lambda i, j: j < i,
    "ahead": lambda i, j: j >= i,
    "window": lambda i, j: (j <= i) & (i - j < 5),
    "band": lambda i, j: (i - j).abs() <= 2,
    "prefix": lambda i, j: (j <= i) | (j < 5),
    "window and first keys": lambda i, j: (j <= i) & ((i - j < 4) | (j < 3)),
    "window and global positions": lambda i, j: ((i - j).abs() <= 2) | (i < 2) | (j < 2),
    "some keys": lambda i, j: (j > 3) & (j < 9) & (i >= 0),
    "some queries": lambda i, j: (i > 3) & (j >= 0),
    "corner": lambda i, j: (i < 10) & (j > 5),
    "blocks": lambda i, j: i // 4 == j // 4,
    "other blocks": lambda i, j: i // 5 != j // 5,
    "block-causal": lambda i, j: i // 4 >= j // 4,
    "block window": lambda i, j: (i // 3 - j // 3).abs() <= 1,
    "causal in blocks": lambda i, j: (j <= i) & (i // 4 == j // 4),
    "window in blocks": lambda i, j: (j <= i) & (i // 8 == j // 8) & (i - j < 3),
    "causal in the last blocks": lambda i, j: (j <= i) & (i // 4 - j // 4 <= 2),
    "block-causal and prefix": lambda i, j: (i // 4 >= j // 4) | (j < 6),
}


def pairs_at(mask: Pairs, queries: int, keys: int) -> Tensor:
    return mask(torch.arange(queries)[:, None], torch.arange(keys)[None]).expand(queries, keys)


@pytest.mark.parametrize("name", USUAL)
@pytest.mark.parametrize("sizes", [(24, 24), (40, 30), (17, 33)])
def test_usual_masks_are_boxes(name: str, sizes: tuple[int, int]) -> None:
    pairs = pairs_at(USUAL[name], *sizes)
    for found, wanted in ((region_of(pairs), pairs), (region_of(~pairs), ~pairs)):
        assert all(isinstance(one, Box) for one in found)
        assert torch.equal(inside(found, *sizes), wanted)
        for t, s in ((1, 1), (9, 9), (5, 16)):  # a program may read a part
            assert torch.equal(inside(found, t, s), wanted[:t, :s])


def test_masks_without_bounds_have_none() -> None:
    pairs = torch.ones(6, 9, dtype=torch.bool)
    assert region_of(pairs) == EVERYTHING and region_of(~pairs) == NOTHING
    (causal,) = region_of(pairs.tril())
    assert isinstance(causal, Box) and causal.apart.low == 0 and len(list(causal.bounds())) == 1


MATRICES = st.tuples(st.integers(1, 9), st.integers(1, 9)).flatmap(
    lambda sizes: st.lists(st.booleans(), min_size=sizes[0] * sizes[1], max_size=sizes[0] * sizes[1]).map(
        lambda bits: torch.tensor(bits).view(sizes)
    )
)


@settings(max_examples=200, deadline=None)
@given(MATRICES)
def test_any_data_have_a_region_with_exactly_their_pairs(pairs: Tensor) -> None:
    assert torch.equal(inside(region_of(pairs), *pairs.shape), pairs)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(USUAL)), st.integers(2, 20), st.integers(2, 20), st.data())
def test_one_other_pair_is_not_overlooked(name: str, queries: int, keys: int, data: st.DataObject) -> None:
    pairs = pairs_at(USUAL[name], queries, keys).clone()
    place = data.draw(st.integers(0, queries - 1)), data.draw(st.integers(0, keys - 1))
    pairs[place] = ~pairs[place]
    assert torch.equal(inside(region_of(pairs), queries, keys), pairs)


def causal(size: int = 12) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool).tril()


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.float16, torch.int64, torch.uint8])
def test_booleans_and_zeros_and_ones_are_masks(dtype: torch.dtype) -> None:
    found = known_of([causal().to(dtype).view(1, 1, 12, 12)])
    assert isinstance(found, Mask) and found.sure == found.possible == region_of(causal())


@pytest.mark.parametrize("least", [-INF, -1e4, -1e9])
def test_floats_that_forbid_are_biases(least: float) -> None:
    slopes = -torch.arange(12.0).flip(0) * torch.tensor([1.0, 0.5]).view(2, 1, 1)  # ALiBi, of two heads
    found = known_of([slopes.masked_fill(~causal(), least)])
    assert isinstance(found, Bias) and found.forbidden == region_of(~causal())


def test_other_weights_are_not_known() -> None:
    nan, large = torch.zeros(4, 4), torch.zeros(4, 4)
    nan[1, 2], large[1, 2] = float("nan"), -5e3  # so small that it may forbid, or not
    others = (
        nan,
        large,
        torch.randn(4, 4),
        torch.arange(16).view(4, 4),
        torch.zeros(4),
        torch.zeros(2, 2) * 1j,
    )
    assert all(known_of([value]) is None for value in others)
    assert known_of([torch.tensor(-INF)]) == known_of([torch.full((1, 1), -INF)] * 2) == Constant(-INF)
    assert known_of([torch.tensor(-INF), torch.tensor(0.0)]) is None
    assert known_of([causal(), torch.randn(12, 12)]) is None


def test_members_agree_on_what_is_known() -> None:
    """What one member allows is possible, and what all allow is sure. A bias forbids what all forbid."""
    own = [causal(), causal() & pairs_at(USUAL["window"], 12, 12)]
    found = known_of(own)
    assert isinstance(found, Mask)
    assert torch.equal(inside(found.sure, 12, 12), own[1])
    assert torch.equal(inside(found.possible, 12, 12), own[0])
    heads = known_of([torch.stack(own)])
    assert isinstance(heads, Mask) and heads == found
    bias = known_of([torch.zeros(12, 12).masked_fill(~mask, -INF) for mask in own])
    assert isinstance(bias, Bias) and torch.equal(inside(bias.forbidden, 12, 12), ~own[0])


def test_one_value_is_read_at_a_time() -> None:
    made: list[weakref.ref[Tensor]] = []

    def value() -> Tensor:
        assert all(ref() is None for ref in made)
        found = causal().float()
        made.append(weakref.ref(found))
        return found

    assert known_of(value() for _ in range(3)) == known_of([causal()])
    assert len(made) == 3


def test_tables_are_counted_where_they_are_read_at_a_fixed_size() -> None:
    torch.manual_seed(0)
    pairs = torch.rand(8, 9) < 0.5
    region = region_of(pairs)
    (table,) = region
    assert isinstance(table, PairTable)
    rest, below = complement(region), both(region, region_of(torch.ones(8, 9, dtype=torch.bool).tril()))
    assert rest is not None and below is not None
    for t, s in ((8, 9), (5, 9), (3, 2)):
        sizes = sympy.Integer(t), sympy.Integer(s)
        for found, wanted in ((region, pairs), (rest, ~pairs), (below, pairs.tril())):
            assert count(found, *sizes) == int(wanted[:t, :s].sum())
    later = table.moved(sympy.Integer(-2), sympy.Integer(-1))
    assert later is not None and torch.equal(later.inside, pairs[2:, 1:])
    length = sympy.Symbol("T", integer=True, positive=True)
    assert count(region, length, sympy.Integer(9)) is None
    assert table.moved(-length, sympy.Integer(0)) is None
    assert count(region, sympy.Integer(8), sympy.Integer(10)) is None
