"""Tests unmerge: ranks and bases that are found, and weights that stay stacked."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fleet.drawn_fleets import drawn_fleet, relative_error
from widepack.fleet.factors import Factors, KeptStacked
from widepack.fleet.low_rank import ulps
from widepack.fleet.unmerge import most_rank, unmerge

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
BASE_ERROR = {torch.float32: 1e-7, torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float64: 5e-16}


def unmerged(members: list[Tensor], base: Tensor | None = None, dtype: torch.dtype | None = None) -> Factors:
    """Returns the factors, and checks what is true of all factors."""
    found = unmerge(members, base, dtype)
    assert isinstance(found, Factors), found
    shape, count = members[0].shape, len(members)
    assert found.base.shape == shape and found.base.dtype == members[0].dtype
    rows, columns = shape[0], shape.numel() // shape[0]
    assert found.left.shape == (count, rows, found.rank)
    assert found.right.shape == (count, found.rank, columns)
    assert found.rank == max(found.ranks)
    for i, rank in enumerate(found.ranks):
        assert not found.left[i, :, rank:].any() and not found.right[i, rank:].any()
    assert found.residual.rms < 4 and found.residual.largest < 2.5
    return found


@pytest.mark.parametrize("dtype", FLOATS)
def test_base_given(dtype: torch.dtype) -> None:
    base, members = drawn_fleet((96, 128), (4, 8, 8), dtype, 0.05)
    found = unmerged(members, base)
    assert found.ranks == [4, 8, 8] and found.source == "given" and torch.equal(found.base, base)
    assert found.left.dtype == found.right.dtype == dtype
    assert found.residual.rms < 1.2


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("place", [0, 2])
def test_base_among_the_members(dtype: torch.dtype, place: int) -> None:
    base, members = drawn_fleet((96, 128), (4, 8, 6), dtype, 0.05)
    members.insert(place, base)
    found = unmerged(members)
    ranks = [4, 8, 6]
    ranks.insert(place, 0)
    assert found.ranks == ranks and found.source == place and torch.equal(found.base, base)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("ranks", [(8, 8, 8), (4, 8, 6, 5), (8, 2, 8, 8, 8, 8, 8, 8, 8, 8, 4)])
def test_base_absent(dtype: torch.dtype, ranks: tuple[int, ...]) -> None:
    base, members = drawn_fleet((96, 128), ranks, dtype, 0.05)
    found = unmerged(members)
    assert found.ranks == list(ranks) and found.source == "recovered"
    assert relative_error(found.base, base) <= BASE_ERROR[dtype]


def test_the_base_of_many_members_is_exact_in_16_bits() -> None:
    base, members = drawn_fleet((96, 128), (4,) * 8, torch.bfloat16, 0.02)
    found = unmerged(members)
    assert (found.base == base).double().mean() > 0.9


def test_two_members_without_a_base() -> None:
    _, members = drawn_fleet((96, 128), (4, 8), torch.float32, 0.05)
    found = unmerged(members)
    assert found.ranks == [0, 12] and found.source == 0 and torch.equal(found.base, members[0])


def test_one_member_and_equal_members() -> None:
    base, members = drawn_fleet((32, 32), (2,), torch.float32, 0.05)
    assert unmerged(members).ranks == [0]
    assert unmerged(members, base).ranks == [2]
    same = unmerged([members[0]] * 4)
    assert same.ranks == [0] * 4 and same.rank == 0 and torch.equal(same.base, members[0])
    zeros = unmerged([torch.zeros(8, 8)] * 3)
    assert zeros.rank == 0 and not zeros.base.any()


def test_members_that_occur_twice() -> None:
    base, (a, b, c) = drawn_fleet((96, 128), (4, 4, 4), torch.float32, 0.05)
    found = unmerged([a, a, b, b, c])
    assert found.source == "recovered" and found.ranks == [4] * 5
    assert relative_error(found.base, base) <= 1e-7
    assert unmerged([a, a, base]).ranks in ([0, 0, 4], [4, 4, 0])


def test_members_that_share_their_right_factor() -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(96, 128, generator=generator) * 0.03
    right = torch.randn(4, 128, generator=generator) * 0.01
    members = [base + torch.randn(96, 4, generator=generator) @ right for _ in range(4)]
    assert unmerged(members).rank == 4


@pytest.mark.parametrize("shape", [(8, 8), (512, 8), (8, 512), (16, 12), (1, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiny_tall_and_wide_matrices(shape: tuple[int, int], dtype: torch.dtype) -> None:
    base, members = drawn_fleet(shape, (1, 1, 1, 1), dtype, 0.1)
    if shape == (1, 64):
        assert most_rank(base) == 0
        assert isinstance(unmerge(members, base), KeptStacked)
        return
    assert unmerged(members, base).ranks == [1] * 4
    found = unmerged(members)
    assert found.ranks == [1] * 4 and found.source == "recovered"


def test_large_matrices_are_drawn_and_leave_the_global_generator() -> None:
    base, members = drawn_fleet((300, 400), (8, 40, 8), torch.float32, 0.05)
    before = torch.get_rng_state()
    a, b = unmerged(members), unmerged(members)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(a.left, b.left) and torch.equal(a.base, b.base)
    assert a.ranks == [8, 40, 8] and relative_error(a.base, base) <= 1e-7


def test_convolutions() -> None:
    base, members = drawn_fleet((32, 16, 3, 3), (4, 4, 4), torch.float32, 0.05)
    found = unmerged(members)
    assert found.ranks == [4] * 3 and found.base.shape == (32, 16, 3, 3)
    assert relative_error(found.base, base) <= 1e-7


def test_strong_fine_tunes_in_bf16_get_wider_factors_where_they_need_them() -> None:
    base, members = drawn_fleet((96, 128), (8, 8, 8), torch.bfloat16, 5.0)
    narrow, wide = unmerged(members, base), unmerged(members, base, torch.float32)
    assert narrow.left.dtype == torch.bfloat16 and wide.left.dtype == torch.float32
    assert wide.residual.rms <= narrow.residual.rms


def test_a_base_of_another_dtype_is_rounded() -> None:
    base, members = drawn_fleet((96, 128), (8, 8, 8), torch.float32, 0.1)
    halves = [m.bfloat16() for m in members]
    found = unmerged(halves, base)
    assert torch.equal(found.base, base.bfloat16()) and found.ranks == [8, 8, 8]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 96), (300, 400)])
@pytest.mark.parametrize("strength", [0.005, 0.3])
def test_full_fine_tunes_stay_stacked(dtype: torch.dtype, shape: tuple[int, int], strength: float) -> None:
    generator = torch.Generator().manual_seed(3)
    base = (torch.randn(shape, generator=generator) * 0.03).to(dtype)
    members = [(base + strength * 0.03 * torch.randn(shape, generator=generator)).to(dtype) for _ in range(4)]
    for found in (unmerge(members, base), unmerge(members), unmerge([*members, base])):
        assert isinstance(found, KeptStacked)
        assert "no low-rank fine-tune" in found.reason and "times the error of rounding" in found.reason
        assert found.rank is not None and found.residual is not None and found.residual.rms > 2


def test_one_full_fine_tune_keeps_the_fleet_stacked() -> None:
    base, members = drawn_fleet((96, 128), (4, 4, 4), torch.float32, 0.05)
    members.insert(2, base + 0.001 * torch.randn(base.shape, generator=torch.Generator().manual_seed(1)))
    found = unmerge(members, base)
    assert isinstance(found, KeptStacked) and "member 2" in found.reason


def test_one_element_that_is_changed_by_a_few_ulps_is_no_rounding() -> None:
    base, members = drawn_fleet((96, 128), (4, 4, 4), torch.float32, 0.05)
    members[1] = members[1].clone()
    members[1][3, 5] += 8 * float(ulps(base, base.dtype).square().mean().sqrt())
    found = unmerge(members, base)
    assert isinstance(found, KeptStacked) and "member 1" in found.reason and "ulps" in found.reason


def test_bf16_members_in_float32_files_stay_stacked() -> None:
    base, members = drawn_fleet((96, 128), (4, 4, 4), torch.bfloat16, 0.05)
    assert isinstance(unmerge([m.float() for m in members], base.float()), KeptStacked)


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (torch.zeros(8, 8, dtype=torch.int64), "it is int64; unmerged are float32, float64"),
        (torch.zeros(8), "it has 1 dims"),
        (torch.zeros(0, 8), "it has no elements"),
        (torch.full((8, 8), float("nan")), "member 0 has NaN or infinite elements"),
        (torch.full((8, 8), float("inf")), "member 0 has NaN or infinite elements"),
    ],
)
def test_weights_that_are_never_unmerged(weight: Tensor, reason: str) -> None:
    found = unmerge([weight, weight])
    assert isinstance(found, KeptStacked) and reason in found.reason
    assert found.rank is None


def test_a_base_with_nan_stays_stacked() -> None:
    found = unmerge([torch.zeros(8, 8)] * 2, torch.full((8, 8), float("nan")))
    assert isinstance(found, KeptStacked) and "the base has NaN" in found.reason


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="at least one member"):
        unmerge([])
    with pytest.raises(ValueError, match=r"member 1 is torch.float32 \[8, 9\], and member 0"):
        unmerge([torch.zeros(8, 8), torch.zeros(8, 9)])
    with pytest.raises(ValueError, match="member 1 is torch.float64"):
        unmerge([torch.zeros(8, 8), torch.zeros(8, 8).double()])
    with pytest.raises(ValueError, match=r"the base is \[9, 8\]"):
        unmerge([torch.zeros(8, 8)], torch.zeros(9, 8))


@settings(max_examples=40)
@given(
    rows=st.integers(24, 160),
    columns=st.integers(24, 160),
    rank=st.integers(1, 5),
    count=st.integers(3, 6),
    strength=st.sampled_from([0.02, 0.1, 0.3]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    base_is=st.sampled_from(["given", "among", "absent"]),
    seed=st.integers(0, 1000),
)
def test_drawn_fleets(
    rows: int,
    columns: int,
    rank: int,
    count: int,
    strength: float,
    dtype: torch.dtype,
    base_is: str,
    seed: int,
) -> None:
    """The rank is right where the factors pay, the base too, and all weights are near their members."""
    rank = min(rank, min(rows, columns) // 8)
    base, members = drawn_fleet((rows, columns), (rank,) * count, dtype, strength, seed)
    ranks = [rank] * count
    if base_is == "among":
        place = seed % (count + 1)
        members.insert(place, base)
        ranks.insert(place, 0)
    found = unmerged(members, base if base_is == "given" else None)
    assert found.ranks == ranks
    assert relative_error(found.base, base) <= BASE_ERROR[dtype]
    if base_is != "absent":
        assert torch.equal(found.base, base)
