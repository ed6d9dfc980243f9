"""Tests sums of parts of the members: figures of all members, as near to float64 as two passes."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from widepack.reduction.figures import FIGURES, check_answers, requested
from widepack.reduction.reduce import reduced
from widepack.reduction.sums import StreamedSums, add_answers

STREAMED = [name for name, figure in FIGURES.items() if figure.streamed]


def merged(
    answers: torch.Tensor,
    cuts: list[int],
    names: list[str],
    of: str | None,
    weights: torch.Tensor | None,
    most: int = 2**20,
    dim: int = -1,
) -> dict[str, torch.Tensor]:
    """Returns the figures of parts of the members. cuts: where a part ends."""
    wanted = requested(names, of, weights is not None)
    at = check_answers(answers, wanted, of, dim, rows=False) - 1
    shares = [1.0] * len(answers) if weights is None else weights.tolist()
    reads = frozenset(r for w in wanted for r in w.figure.reads)
    total = StreamedSums(of, at, weights is None, reads)
    for start, stop in itertools.pairwise([0, *cuts, len(answers)]):
        part = StreamedSums(of, at, weights is None, reads)
        if stop > start:
            add_answers(part, answers[start:stop], shares[start:stop], most)
        total.merge(part)
    assert total.members == len(answers)
    return {w.text: w.figure.compute(total, w.number) for w in wanted}


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 9),
    st.lists(st.integers(0, 9), max_size=3),
    st.booleans(),
    st.sampled_from([None, "softmax", "sigmoid"]),
    st.integers(1, 40),
    st.integers(0, 2),
    st.integers(0, 2**31),
)
def test_parts_have_the_figures_of_all_members(
    members: int, cuts: list[int], even: bool, of: str | None, most: int, dim: int, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    answers = torch.randn(members, 2, 3, 4, generator=draw, dtype=torch.float64).round(decimals=1)
    weights = None if even else torch.rand(members, generator=draw, dtype=torch.float64) + 0.1
    weights = weights / weights.sum() if weights is not None else None
    names = [
        n
        for n in STREAMED
        if (even or FIGURES[n].weighted) and (of is not None or FIGURES[n].needs != "probabilities")
    ]
    found = merged(answers, sorted(min(c, members) for c in cuts), names, of, weights, most, dim)
    wanted = requested(names, of, weights is not None)
    at = check_answers(answers, wanted, of, dim, rows=False)
    whole = reduced(answers, wanted, of, at, weights)
    for name in names:
        torch.testing.assert_close(found[name], whole[name], rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize(("offset", "spread"), [(0.0, 1.0), (1000.0, 1e-3), (-3e4, 1e-2)])
@pytest.mark.parametrize("cuts", [[8], [1], [3, 4, 11]])
def test_parts_are_as_near_to_float64_as_two_passes(offset: float, spread: float, cuts: list[int]) -> None:
    torch.manual_seed(0)
    answers = torch.randn(16, 4, 64) * spread + offset
    exact = {
        "mean": answers.double().mean(0),
        "var": answers.double().var(0, correction=0),
        "std": answers.double().std(0, correction=0),
    }
    found = merged(answers, cuts, list(exact), None, None)
    var = ((answers - answers.mean(0)) ** 2).mean(0)
    plain = {"mean": answers.mean(0), "var": var, "std": var.sqrt()}
    for name, truth in exact.items():
        error = (found[name].double() - truth).abs().max()
        two_passes = (plain[name].double() - truth).abs().max()
        floor = torch.finfo(torch.float32).eps * truth.abs().max()
        assert error <= 2 * max(two_passes, floor), name


def test_what_is_not_finite_stays_so() -> None:
    answers = torch.randn(6, 5)
    answers[4, 0], answers[1, 1], answers[0, 2] = float("nan"), float("inf"), float("-inf")
    names = ["mean", "var", "min", "max"]
    found = merged(answers, [2], names, None, None)
    whole = reduced(answers, requested(names, None, False), None, 1, None)
    for name in names:
        torch.testing.assert_close(found[name], whole[name], equal_nan=True, msg=name)


def test_half_precision_is_summed_in_float32() -> None:
    answers = torch.randn(6, 5).bfloat16()
    found = merged(answers, [3], ["mean", "std", "vote"], None, None)
    assert found["mean"].dtype is found["std"].dtype is torch.float32
    assert found["vote"].dtype is torch.int64
