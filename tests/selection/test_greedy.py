"""Tests the greedy selection of members, and their losses, against plain definitions."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from widepack.selection.greedy import select_members
from widepack.selection.losses import (
    METRICS,
    error,
    log_loss,
    means,
    moments,
    normal_nll,
    score,
    squared_error,
)


def drawn(members: int, rows: int, classes: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(members, rows, classes, generator=generator, dtype=torch.float64)
    return scores.softmax(2), torch.randint(0, classes, (rows,), generator=generator)


@given(st.integers(1, 5), st.integers(1, 8), st.integers(0, 10_000), st.integers(1, 12))
@settings(max_examples=50, deadline=None)
def test_the_selection_is_the_best_round_of_greedy_choices(
    members: int, rows: int, seed: int, rounds: int
) -> None:
    predictions, targets = drawn(members, rows, 3, seed)
    losses = METRICS["accuracy"]
    bag: list[int] = []
    rounds_found = []
    for _ in range(rounds):
        options = [(means(losses, predictions[[*bag, i]].mean(0), targets), i) for i in range(members)]
        bag.append(min(options)[1])
        rounds_found.append(means(losses, predictions[bag].mean(0), targets))
    best = min(range(rounds), key=lambda k: (rounds_found[k], k))
    found = select_members(predictions, targets, losses, rounds)
    assert found.losses == pytest.approx(rounds_found[best])
    kept = bag[: len([*itertools.chain(bag)][: sum(found.counts)])]
    assert found.counts == [kept.count(i) for i in range(members)]
    assert found.order == list(dict.fromkeys(kept)) and sum(found.weights) == pytest.approx(1)


def test_the_best_member_is_never_lost() -> None:
    for seed in range(20):
        predictions, targets = drawn(6, 40, 4, seed)
        losses = METRICS["log_loss"]
        single = min(means(losses, p, targets) for p in predictions)
        assert select_members(predictions, targets, losses, 30).losses <= single


def test_at_most_so_many_members() -> None:
    predictions, targets = drawn(8, 60, 4, 3)
    found = select_members(predictions, targets, METRICS["log_loss"], 50, most=2)
    assert len(found.order) <= 2 and sum(map(bool, found.counts)) == len(found.order)


def test_losses_are_those_of_torch() -> None:
    predictions, targets = drawn(1, 30, 5, 1)
    p = predictions[0]
    expected = torch.nn.functional.nll_loss(p.log(), targets, reduction="none")
    torch.testing.assert_close(log_loss(p, targets), expected)
    torch.testing.assert_close(error(p, targets), (p.argmax(1) != targets).double())
    images = torch.rand(4, 3, 5, 6, dtype=torch.float64)
    labels = torch.randint(0, 3, (4, 5, 6))
    torch.testing.assert_close(error(images, labels), (images.argmax(1) != labels).double().mean((1, 2)))
    numbers = torch.randn(7, 2)
    torch.testing.assert_close(
        squared_error(numbers, numbers + 0.5), torch.full((7,), 0.25, dtype=torch.float64)
    )
    assert score("accuracy", 0.25) == 0.75 and score("log_loss", 0.25) == 0.25


@given(st.integers(2, 5), st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_moments_give_the_nll_of_weighted_members(members: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    y = 1000 + torch.randn(members, 7, 2, generator=generator, dtype=torch.float64)
    targets = 1000 + torch.randn(7, 2, generator=generator, dtype=torch.float64)
    weights = torch.rand(members, generator=generator, dtype=torch.float64)
    weights /= weights.sum()
    mean = torch.tensordot(weights, y, 1)
    variance = torch.tensordot(weights, (y - mean).square(), 1)
    expected = 0.5 * ((2 * math.pi * variance).log() + (mean - targets).square() / variance).mean(1)
    found, shifted = moments(y, targets)
    torch.testing.assert_close(normal_nll(torch.tensordot(weights, found, 1), shifted), expected)
