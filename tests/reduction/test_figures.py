"""Tests the figures of an ensemble against their definitions, computed member by member in float64."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from widepack.errors import InputError, UsageError
from widepack.reduction.figures import check_answers, normalised, requested
from widepack.reduction.reduce import mixture, reduced
from widepack.reduction.sums import blocks

REAL = ("mean", "var", "std", "min", "max", "median", "quantile(0.3)")
VOTES = ("vote", "votes", "disagreement", "variation_ratio")
PROBABILITIES = ("entropy", "expected_entropy", "mutual_information")


def column(values: list[float], weights: list[float]) -> dict[str, float]:
    """Returns the figures of one number of each member."""
    mean = sum(w * v for w, v in zip(weights, values))
    var = sum(w * (v - mean) ** 2 for w, v in zip(weights, values))
    ordered = sorted(values)

    def quantile(q: float) -> float:
        place = q * (len(values) - 1)
        low = math.floor(place)
        high = min(low + 1, len(values) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    found = {"mean": mean, "var": var, "std": math.sqrt(var), "min": min(values), "max": max(values)}
    return {**found, "median": quantile(0.5), "quantile(0.3)": quantile(0.3)}


def entropy(probabilities: list[float]) -> float:
    return -sum(p * math.log(p) for p in probabilities if p > 0)


def by_class(scores: list[list[float]], weights: list[float], probable: bool) -> dict[str, Any]:
    """Returns the figures of one position: the scores of the classes of each member."""
    labels = [row.index(max(row)) for row in scores]
    classes, members = len(scores[0]), len(scores)
    counts = Counter(labels)
    even = len(set(weights)) == 1
    votes = [
        counts[c] if even else sum(w for w, label in zip(weights, labels) if label == c)
        for c in range(classes)
    ]
    pairs = sum(n * (n - 1) for n in counts.values())
    found: dict[str, Any] = {
        "vote": votes.index(max(votes)),
        "votes": votes,
        "disagreement": 1 - pairs / (members * (members - 1)) if members > 1 else 0.0,
        "variation_ratio": 1 - max(votes) / (members if even else 1),
    }
    if probable:
        soft = []
        for row in scores:
            total = sum(math.exp(s - max(row)) for s in row)
            soft.append([math.exp(s - max(row)) / total for s in row])
        mean = [sum(w * p[c] for w, p in zip(weights, soft)) for c in range(classes)]
        found["entropy"] = entropy(mean)
        found["expected_entropy"] = sum(w * entropy(p) for w, p in zip(weights, soft))
        found["mutual_information"] = max(0.0, found["entropy"] - found["expected_entropy"])
    return found


def computed(
    answers: torch.Tensor, names: tuple[str, ...], of: str | None, dim: int, weights: Any, most: int
) -> dict[str, torch.Tensor]:
    wanted = requested(names, of, weights is not None)
    at = check_answers(answers, wanted, of, dim, rows=False)
    return reduced(answers, wanted, of, at, normalised(weights, len(answers), answers), most)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.booleans(), st.integers(1, 40), st.integers(0, 2**31), st.integers(0, 2))
def test_every_figure_is_its_definition(members: int, even: bool, most: int, seed: int, dim: int) -> None:
    """At every position, with and without weights, in blocks of any size, with the classes in any dim."""
    draw = torch.Generator().manual_seed(seed)
    answers = torch.randn(members, 2, 3, 4, generator=draw, dtype=torch.float64)
    answers = answers.round(decimals=1)  # so that some members answer the same
    weights = None if even else torch.rand(members, generator=draw, dtype=torch.float64) + 0.1
    shares = [1 / members] * members if weights is None else (weights / weights.sum()).tolist()
    names: tuple[str, ...] = REAL if even else REAL[:3]
    found = computed(answers, names, None, -1, weights, most)
    for at in ((0, 0, 0), (1, 2, 3), (0, 1, 2)):
        want = column(answers[:, at[0], at[1], at[2]].tolist(), shares)
        for name in names:
            assert math.isclose(float(found[name][at]), want[name], rel_tol=1e-9, abs_tol=1e-12), name
    names = (*VOTES, *PROBABILITIES) if even else ("vote", "votes", "variation_ratio", *PROBABILITIES)
    found = computed(answers, names, "softmax", dim, weights, most)
    last = answers.movedim(dim + 1, -1)
    for at2 in ((0, 0), (1, 2)):
        want = by_class(last[:, at2[0], at2[1]].tolist(), shares, probable=True)
        for name in names:
            value = found[name].movedim(dim, -1)[at2] if name == "votes" else found[name][at2]
            wanted = torch.tensor(want[name], dtype=torch.float64)
            torch.testing.assert_close(value.double(), wanted, rtol=1e-8, atol=1e-11, msg=name)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 7), st.integers(1, 40), st.integers(0, 2**31))
def test_labels_are_decisions_of_their_own(members: int, most: int, seed: int) -> None:
    answers = torch.randn(members, 3, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = computed(answers, (*VOTES, *PROBABILITIES, "mean"), "sigmoid", -1, None, most)
    for at in ((0, 0), (2, 3)):
        scores = answers[:, at[0], at[1]].tolist()
        want = by_class([[0.0, s] for s in scores], [1 / members] * members, probable=True)
        yes = sum(s > 0 for s in scores)
        assert int(found["votes"][at]) == yes
        assert int(found["vote"][at]) == (2 * yes > members)
        for name in ("disagreement", "variation_ratio", *PROBABILITIES):
            assert math.isclose(float(found[name][at]), want[name], rel_tol=1e-8, abs_tol=1e-11), name
        mean = sum(1 / (1 + math.exp(-s)) for s in scores) / members
        assert math.isclose(float(found["mean"][at]), mean, rel_tol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("of", [None, "softmax"])
def test_low_precision_is_as_near_as_two_passes(dtype: torch.dtype, of: str | None) -> None:
    """At a mean of 1000 and a deviation of 1e-3, E[x^2] - E[x]^2 in float32 is wrong by millions."""
    torch.manual_seed(0)
    offset = 1000.0 if dtype is torch.float32 and of is None else 0.0
    answers = (torch.randn(16, 4, 64) * (1e-3 if offset else 1.0) + offset).to(dtype)
    names = ("mean", "var", "std", *(PROBABILITIES if of else ()))
    exact = computed(answers.double(), names, of, -1, None, 2**20)
    found = computed(answers, names, of, -1, None, 1000)
    values = answers.float().softmax(-1) if of else answers.float()
    var = ((values - values.mean(0)) ** 2).mean(0)
    plain = {"mean": values.mean(0), "var": var, "std": var.sqrt()}
    for name in names:
        assert found[name].dtype is torch.float32
        if name in plain:
            error = (found[name].double() - exact[name]).abs().max()
            other = (plain[name].double() - exact[name]).abs().max()
            floor = torch.finfo(torch.float32).eps * exact[name].abs().max()
            assert error <= 2 * max(other, floor), name
        else:
            torch.testing.assert_close(found[name].double(), exact[name], rtol=1e-4, atol=2e-6)


def test_certain_members_have_no_entropy() -> None:
    scores = torch.tensor([[[200.0, -200.0]], [[-200.0, 200.0]]])
    found = computed(scores, PROBABILITIES, "softmax", -1, None, 99)
    torch.testing.assert_close(found["entropy"], torch.tensor([math.log(2)]))
    assert float(found["expected_entropy"]) == 0
    torch.testing.assert_close(found["mutual_information"], torch.tensor([math.log(2)]))
    infinite = torch.tensor([[[0.0, -math.inf]], [[0.0, -math.inf]]])
    assert all(float(v) == 0 for v in computed(infinite, PROBABILITIES, "softmax", -1, None, 9).values())


def test_an_answer_that_is_missing_is_missing_in_every_figure_of_its_position() -> None:
    answers = torch.zeros(3, 2, 4)
    answers[1, 0, 2] = math.nan
    for name, value in computed(answers, REAL, None, -1, None, 99).items():
        assert bool(value[0, 2].isnan()), name
        assert int(value.isnan().sum()) == 1, name


def test_the_lowest_class_wins_a_tie() -> None:
    scores = torch.tensor([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    assert int(computed(scores, ("vote",), None, -1, None, 9)["vote"]) == 0
    weights = [3.0, 1.0]
    assert int(computed(scores, ("vote",), None, -1, weights, 9)["vote"]) == 2


def test_mixture_is_the_variance_of_all_distributions_together() -> None:
    torch.manual_seed(0)
    means, variances = torch.randn(5, 3, dtype=torch.float64), torch.rand(5, 3, dtype=torch.float64)
    mean, variance = mixture(means, variances, None)
    torch.testing.assert_close(mean, means.mean(0))
    torch.testing.assert_close(variance, (variances + means**2).mean(0) - mean**2)
    weights = torch.tensor([0.5, 0.5, 0, 0, 0], dtype=torch.float64)
    mean, variance = mixture(means, variances, weights)
    torch.testing.assert_close(variance, (variances + means**2)[:2].mean(0) - means[:2].mean(0) ** 2)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=5),
    st.integers(1, 300),
    st.none() | st.integers(0, 4),
)
def test_blocks_cover_each_position_once(shape: list[int], most: int, whole: int | None) -> None:
    whole = None if whole is None or whole >= len(shape) else whole
    seen = torch.zeros(shape, dtype=torch.int64)
    for place in blocks(shape, whole, most):
        assert place[0] == slice(0, shape[0]) and (whole is None or place[whole] == slice(0, shape[whole]))
        seen[place] += 1
    assert bool((seen == 1).all())


def test_no_answers_give_empty_figures() -> None:
    found = computed(torch.zeros(3, 0, 4), (*REAL, *VOTES, *PROBABILITIES), "softmax", -1, None, 99)
    assert {tuple(v.shape) for v in found.values()} == {(0, 4), (0,)}


@pytest.mark.parametrize(
    ("names", "of", "weighted", "words"),
    [
        (["meen"], None, False, "no figure 'meen' (did you mean 'mean'?). Known"),
        (["entropy"], None, False, "entropy needs probabilities. Say what the answers are: of='softmax'"),
        (["mean"], "relu", False, "of='relu' is unknown; known: softmax, sigmoid, probabilities, None"),
        (["quantile"], None, False, "quantile needs the share of members in parentheses"),
        (["quantile(2)"], None, False, "a number from 0 to 1"),
        (["quantile(nan)"], None, False, "a number from 0 to 1"),
        (["quantile(x)"], None, False, "a number from 0 to 1"),
        (["mean(3)"], None, False, "mean has no number in parentheses"),
        (["median"], None, True, "median is not defined for members with weights"),
    ],
)
def test_requests_that_cannot_be(names: list[str], of: str | None, weighted: bool, words: str) -> None:
    with pytest.raises(UsageError) as error:
        requested(names, of, weighted)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("answers", "name", "dim", "rows", "words"),
    [
        (torch.zeros(3, 2, dtype=torch.int64), "mean", -1, False, "the members' answers are int64"),
        (torch.zeros(3, 2, dtype=torch.complex64), "min", -1, False, "complex: min is defined for real"),
        (torch.zeros(3, 5), "vote", -1, True, "of the members' answers is the batch"),
        (torch.zeros(3), "vote", -1, False, "a member answers one number: vote needs scores of classes"),
        (torch.zeros(3, 5, 4), "vote", 2, False, "dim=2: a member's answer has 2 dims, so dim is -2 to 1"),
    ],
)
def test_answers_without_a_figure(answers: torch.Tensor, name: str, dim: int, rows: bool, words: str) -> None:
    with pytest.raises((InputError, UsageError)) as error:
        check_answers(answers, requested([name], None, False), None, dim, rows)
    assert words in str(error.value)


def test_weights_that_cannot_be() -> None:
    answers = torch.zeros(2, 3)
    for weights, words in (
        ([1.0], "1 weights for 2 members"),
        ([1.0, -1.0], "finite and not negative"),
        ([0.0, 0.0], "at least one must be above 0"),
        ([math.nan, 1.0], "must be finite"),
        ("ab", "is not a list of numbers"),
    ):
        with pytest.raises(UsageError, match=words):
            normalised(weights, 2, answers)
