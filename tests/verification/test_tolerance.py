"""Tests the comparison of answers in parts: wrong numbers are found, and the sums equal those of all numbers
together.
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
"""The size of three parts, of which the last is shorter."""


def answers(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Returns a member's answer in its dtype, and its answer in float64."""
    drawn = torch.randn(
        SIZE,
        generator=torch.Generator().manual_seed(0),
        dtype=torch.complex128 if dtype.is_complex else torch.float64,
    )
    return drawn.to(dtype), drawn


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_figures_of_parts_equal_those_of_all_numbers(dtype: torch.dtype) -> None:
    member_answer, exact = answers(dtype)
    wide = member_answer.clone()
    wide[SIZE - 3] += 0.5
    pool = ErrorStats("y")
    pool.add_own(member_answer, exact)
    error, member_error = (wide.to(exact.dtype) - exact).abs(), (member_answer.to(exact.dtype) - exact).abs()
    assert pool.count == SIZE and pool.own_max == float(member_error.max())
    assert pool.own_rms == pytest.approx(
        float(member_error.square().mean().sqrt())
    ) and pool.scale == pytest.approx(float(exact.abs().square().mean().sqrt()))
    found = measure("0", "call", wide, member_answer, exact)
    assert (found.words, found.count, found.largest) == ("", SIZE, float(error.max()))
    assert found.rms == pytest.approx(float(error.square().mean().sqrt())) and found.own == pytest.approx(
        float(member_error.square().mean().sqrt())
    )
    assert differs(member_answer, member_answer) == "" and "is off by" in differs(wide, member_answer)


@given(st.integers(0, SIZE - 1), st.sampled_from([float("nan"), float("inf"), float("-inf")]))
def test_numbers_that_are_not_finite_are_found_anywhere(place: int, value: float) -> None:
    member_answer, exact = answers()
    wide = member_answer.clone()
    wide[place] = value
    assert not same_places(wide, member_answer) and not same_places(member_answer, wide)
    assert "NaN or inf in other places" in measure("0", "call", wide, member_answer, exact).words
    assert differs(wide, member_answer) == "has NaN or inf in other places"
    member_answer[place] = value
    assert (
        same_places(wide, member_answer)
        and measure("0", "call", wide, member_answer, exact).count == SIZE - 1
        and not differs(wide, member_answer)
    )
    member_answer[place] = -value if value == value else 0.0
    assert not same_places(wide, member_answer)


def test_the_largest_number_of_a_dtype_must_be_in_the_same_place() -> None:
    member_answer, exact = answers()
    most = torch.finfo(member_answer.dtype).max
    member_answer[SIZE - 1] = most
    assert measure("0", "call", member_answer.clone(), member_answer, exact).count == SIZE - 1
    wide = member_answer.clone()
    wide[SIZE - 1] = 1.0
    assert "another number where" in measure("0", "call", wide, member_answer, exact).words


def test_conjugated_tensors_are_compared_by_value() -> None:
    member_answer, exact = (v.conj() for v in answers(torch.complex64))
    assert (
        member_answer.is_conj()
        and measure("0", "call", member_answer.resolve_conj(), member_answer, exact).count == SIZE
        and same_places(member_answer, member_answer.resolve_conj())
    )
    pool = ErrorStats("y")
    pool.add_own(member_answer, exact)
    wide = member_answer.resolve_conj().clone()
    torch.view_as_real(wide)[SIZE - 1, 1] = float("nan")
    assert pool.count == SIZE and "NaN or inf" in measure("0", "call", wide, member_answer, exact).words


@pytest.mark.parametrize(
    ("member_answer", "exact"), [((0,), (5,)), ((1,), (5,)), ((2, 3), (3, 2)), ((PART,), (2 * PART,))]
)
def test_a_size_that_depends_on_rounding_is_refused(
    member_answer: tuple[int, ...], exact: tuple[int, ...]
) -> None:
    answer, truth = torch.ones(member_answer), torch.ones(exact, dtype=torch.float64)
    assert "rounding decides a size" in measure("0", "call", answer, answer, truth).words
    with pytest.raises(VerificationError, match="float64 decides otherwise"):
        ErrorStats("y").add_own(answer, truth)


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), ()])
@pytest.mark.parametrize("make", [torch.zeros, torch.ones])
def test_empty_tensors_and_single_numbers(shape: tuple[int, ...], make: Callable[..., Tensor]) -> None:
    member_answer = make(shape)
    assert same_places(member_answer, member_answer) and not differs(member_answer, member_answer)
    assert (
        measure("0", "call", member_answer, member_answer, member_answer.double()).count
        == member_answer.numel()
        == sum(p.numel() for (p,) in parts(member_answer))
    )
    assert not same_places(member_answer, make((5,)))
