"""Tests the FLOP of attention that masks of blocks forbid."""

from __future__ import annotations

from functools import partial

import torch
from attention_masks import INPUTS, Attention, check, ij
from torch import Tensor

from widepack import primitives as primitives  # fills the registry
from widepack.building.model_costs import model_costs


def blocks(t: int, s: int) -> Tensor:
    i, j = ij(t, s)
    return i // 4 == j // 4


def block_causal(t: int, s: int) -> Tensor:
    i, j = ij(t, s)
    return torch.div(i, 3, rounding_mode="floor") >= torch.div(j, 3, rounding_mode="trunc")


def block_window(t: int, s: int) -> Tensor:
    i, j = ij(t, s)
    return ((i >> 2) - torch.bitwise_right_shift(j, 2)).abs() <= 1


def causal_in_blocks(t: int, s: int) -> Tensor:
    i, j = ij(t, s)
    return (torch.floor_divide(i, 5) == j // 5) & (j <= i)


def window_in_blocks_and_first_keys(t: int, s: int) -> Tensor:
    i, j = ij(t, s)
    return ((i // 5 == j // 5) & (i - j < 3) & (i >= j)) | (j < 2)


def last_queries(t: int, s: int) -> Tensor:
    i, j = ij(t, s)
    return (i + (s - t)) // 4 >= j // 4


def from_the_block_on(t: int, s: int) -> Tensor:
    i, j = ij(t, s)
    return j >= i // 4 * 4


def not_behind(t: int, s: int) -> Tensor:
    i, j = ij(t, s)
    return ~(i // 6 > j // 6)


def blocks_of_keys(t: int, s: int) -> Tensor:
    i, j = ij(t, s)
    return j // 4 <= i


def blocks_of_blocks(t: int, s: int) -> Tensor:
    i, j = ij(t, s)
    return i // 2 // 2 == (j + 4) // 4 - 1


def numbers_first(t: int, s: int) -> Tensor:
    rows, columns = torch.arange(t) // 4, torch.arange(s) // 4
    return ~(rows.unsqueeze(-1) == columns.view(1, s)).logical_not()[None].expand(2, t, s)[0]


def block_of_distances(t: int, s: int) -> Tensor:
    i, j = ij(t, s)
    return ((i - j) // 4 >= 0) & (j // 3 < 4)


def one_query(t: int, s: int) -> Tensor:
    """What the second query sees, for all."""
    return (blocks(t, s) & (ij(t, s)[0] < 2 * s))[1:2].expand(t, s)


MASKS = (
    *(blocks, block_causal, block_window, causal_in_blocks, window_in_blocks_and_first_keys, last_queries),
    *(from_the_block_on, not_behind, blocks_of_keys, blocks_of_blocks, numbers_first, block_of_distances),
    one_query,
)


def test_masks_of_blocks() -> None:
    check([(mask, "argument") for mask in MASKS])


def test_attention_that_is_written_out() -> None:
    check([(blocks, "filled"), (causal_in_blocks, "added"), (block_causal, "where")])


def test_wide_programs() -> None:
    check([(block_causal, "argument"), (causal_in_blocks, "added")], wide=4)


def test_blocks_of_two_sizes_are_not_known() -> None:
    def two(t: int, s: int) -> Tensor:
        i, j = ij(t, s)
        return (i // 4 == j // 4) & (i // 6 >= j // 6)

    def of_floats(t: int, s: int) -> Tensor:
        i, j = (x.float() for x in ij(t, s))
        return i / 4 >= j

    for mask in (two, of_floats):
        costs = model_costs(partial(Attention, mask), INPUTS)
        assert "masked_flops" not in costs.totals


def test_blocks_of_one_size_decide_if_the_others_are_inside() -> None:
    def nested(t: int, s: int) -> Tensor:
        i, j = ij(t, s)
        return (i // 4 == j // 4) & (i // 8 - j // 8 < 2)

    check([(nested, "argument")])
