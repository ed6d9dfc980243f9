"""Tests the comparison of answers part by part: wrong numbers are found, and the sums are those of the
whole.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from widepack.errors import VerificationError
from widepack.verification.probe import differs
from widepack.verification.tolerance import PART, ErrorStats, measure, parts, same_places

SIZE = 2 * PART + 17
"""Three parts, the last one short."""


def answers(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """A member's own answer, and its float64 answer."""
    drawn = torch.randn(
        SIZE,
        generator=torch.Generator().manual_seed(0),
        dtype=torch.complex128 if dtype.is_complex else torch.float64,
    )
    return drawn.to(dtype), drawn


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_figures_are_those_of_the_whole(dtype: torch.dtype) -> None:
    own, exact = answers(dtype)
    wide = own.clone()
    wide[SIZE - 3] += 0.5
    pool = ErrorStats("y")
    pool.add_own(own, exact)
    error, mine = (wide.to(exact.dtype) - exact).abs(), (own.to(exact.dtype) - exact).abs()
    assert pool.count == SIZE and pool.own_max == float(mine.max())
    assert pool.own_rms == pytest.approx(float(mine.square().mean().sqrt())) and pool.scale == pytest.approx(
        float(exact.abs().square().mean().sqrt())
    )
    found = measure("0", "call", wide, own, exact)
    assert (found.words, found.count, found.largest) == ("", SIZE, float(error.max()))
    assert found.rms == pytest.approx(float(error.square().mean().sqrt())) and found.own == pytest.approx(
        float(mine.square().mean().sqrt())
    )
    assert differs(own, own) == "" and "is off by" in differs(wide, own)


@given(st.integers(0, SIZE - 1), st.sampled_from([float("nan"), float("inf"), float("-inf")]))
def test_what_is_not_finite_is_found_anywhere(place: int, value: float) -> None:
    own, exact = answers()
    wide = own.clone()
    wide[place] = value
    assert not same_places(wide, own) and not same_places(own, wide)
    assert "NaN or inf in other places" in measure("0", "call", wide, own, exact).words
    assert differs(wide, own) == "has NaN or inf in other places"
    own[place] = value
    assert (
        same_places(wide, own)
        and measure("0", "call", wide, own, exact).count == SIZE - 1
        and not differs(wide, own)
    )
    own[place] = -value if value == value else 0.0
    assert not same_places(wide, own)


def test_the_largest_number_stands_where_the_member_has_it() -> None:
    own, exact = answers()
    most = torch.finfo(own.dtype).max
    own[SIZE - 1] = most
    assert measure("0", "call", own.clone(), own, exact).count == SIZE - 1
    wide = own.clone()
    wide[SIZE - 1] = 1.0
    assert "another number where" in measure("0", "call", wide, own, exact).words


def test_conjugated_tensors() -> None:
    own, exact = (v.conj() for v in answers(torch.complex64))
    assert (
        own.is_conj()
        and measure("0", "call", own.resolve_conj(), own, exact).count == SIZE
        and same_places(own, own.resolve_conj())
    )
    pool = ErrorStats("y")
    pool.add_own(own, exact)
    wide = own.resolve_conj().clone()
    torch.view_as_real(wide)[SIZE - 1, 1] = float("nan")
    assert pool.count == SIZE and "NaN or inf" in measure("0", "call", wide, own, exact).words


@pytest.mark.parametrize(
    ("own", "exact"), [((0,), (5,)), ((1,), (5,)), ((2, 3), (3, 2)), ((PART,), (2 * PART,))]
)
def test_a_size_that_rounding_decides(own: tuple[int, ...], exact: tuple[int, ...]) -> None:
    mine, truth = torch.ones(own), torch.ones(exact, dtype=torch.float64)
    assert "rounding decides a size" in measure("0", "call", mine, mine, truth).words
    with pytest.raises(VerificationError, match="float64 decides otherwise"):
        ErrorStats("y").add_own(mine, truth)


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), ()])
@pytest.mark.parametrize("make", [torch.zeros, torch.ones])
def test_empty_and_single(shape: tuple[int, ...], make: Callable[..., Tensor]) -> None:
    own = make(shape)
    assert same_places(own, own) and not differs(own, own)
    assert (
        measure("0", "call", own, own, own.double()).count
        == own.numel()
        == sum(p.numel() for (p,) in parts(own))
    )
    assert not same_places(own, make((5,)))
