"""Tests figures of answers that come one after the other, against those of all answers at one time."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from widepack.reduction.figures import FIGURES, normalised, requested
from widepack.reduction.reduce import Stream, reduced

NAMES = tuple(name for name, figure in FIGURES.items() if figure.streamed)


def streamed(
    answers: torch.Tensor, names: tuple[str, ...], of: str | None, dim: int, weights: list[float] | None
) -> Stream:
    """Returns a stream that has taken nothing yet."""
    shares = normalised(weights, len(answers), answers)
    equal = [1.0] * len(answers)
    used = dict(enumerate(equal if shares is None else shares.tolist()))
    return Stream(requested(names, of, weights is not None), of, dim, used, shares is None)


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 7),
    st.sampled_from([None, "softmax", "sigmoid"]),
    st.booleans(),
    st.integers(0, 1),
    st.integers(0, 2**31),
)
def test_a_stream_answers_as_the_whole(members: int, of: str | None, even: bool, dim: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    answers = torch.randn(members, 3, 4, generator=draw, dtype=torch.float64).round(decimals=1)
    weights = None if even else (torch.rand(members, generator=draw) + 0.1).tolist()
    names = tuple(
        n for n in NAMES if (even or FIGURES[n].weighted) and (of or FIGURES[n].needs != "probabilities")
    )
    want = reduced(
        answers, requested(names, of, not even), of, dim + 1, normalised(weights, members, answers)
    )
    stream = streamed(answers, names, of, dim, weights)
    order = list(range(members))
    random.Random(seed).shuffle(order)
    for i in order:
        stream.take(i, answers[i])
    found = stream.figures()
    for name in names:
        torch.testing.assert_close(found[name], want[name], rtol=1e-9, atol=1e-12, msg=name)


def test_threads_change_no_bit() -> None:
    torch.manual_seed(0)
    answers = torch.randn(12, 5, 30)
    names = ("mean", "std", "mutual_information")
    results = []
    for _ in range(5):
        stream = streamed(answers, names, "softmax", 1, None)
        threads = [
            threading.Thread(
                target=lambda s, part: [s.take(i, answers[i]) for i in part], args=(stream, part)
            )
            for part in (range(0, 12, 3), range(1, 12, 3), range(2, 12, 3))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        results.append(stream.figures())
    for name in names:
        assert all(torch.equal(r[name], results[0][name]) for r in results), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_answers_that_differ_little(dtype: torch.dtype) -> None:
    """At a mean of 1000 and a deviation of 1e-3, plain Welford in float32 loses most of the variance."""
    torch.manual_seed(0)
    answers = (torch.randn(16, 64) * 1e-3 + 1000).to(dtype)
    stream = streamed(answers, ("mean", "std"), None, 0, None)
    for i, answer in enumerate(answers):
        stream.take(i, answer)
    found = stream.figures()
    torch.testing.assert_close(
        found["std"].double(), answers.double().std(0, correction=0), rtol=1e-5, atol=1e-9
    )
    torch.testing.assert_close(found["mean"].double(), answers.double().mean(0), rtol=2e-7, atol=0)


def test_infinite_answers_have_an_infinite_mean() -> None:
    answers = torch.tensor([[-torch.inf, 1.0], [-torch.inf, 3.0]])
    stream = streamed(answers, ("mean", "min", "std"), None, 0, None)
    for i in (1, 0):
        stream.take(i, answers[i])
    found = stream.figures()
    assert found["mean"].tolist() == [-torch.inf, 2.0] and found["min"].tolist() == [-torch.inf, 1.0]
    assert bool(found["std"][0].isnan()) and float(found["std"][1]) == 1.0
