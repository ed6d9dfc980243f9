"""Evaluates members again after a first comparison failed, before an answer is called wrong.

One evaluation of a member is a small sample of its rounding error. So the member's own program runs again, on
the same numbers in contiguous memory:

| evaluation | what it changes |
|---|---|
| oneDNN off | the kernels of convolutions and linear layers |
| the batch in two halves | the blocks of sums; only if rows are independent in float64 |

1. The own error is the largest of these evaluations, and at most `MOST` times the one that was measured
   first. The factors of the bound do not change.
2. Where rounding decides a near-tie otherwise than float64 (the nearest code of a quantiser, the winner of a
   topk), a wide answer is right if it is within the bound of the answer with the other decision
   (`near_ties.py`). That answer is computed in float64, and only decisions with a margin below the bound of
   the compared numbers differ in it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..kernels.exact_norms import as_torch_computes
from . import near_ties
from .root_mean_square import RootMeanSquare, root_mean_square
from .subject import MemberAnswers, Subject, VerifiedCall
from .tolerance import ErrorStats, floating, measure

MOST = 2.0
"""How many times the member's own error of the first evaluation its error may count, at most."""

Run = Callable[[Sequence[torch.Tensor]], list[Any]]


@dataclass
class Evaluations:
    """The outputs of further evaluations of one member in one call.

    Attributes:
        equal: Those of the same numbers in the member's dtype: for each evaluation its outputs.
        decided: Those in float64 with near-ties that are decided otherwise.
    """

    equal: list[list[torch.Tensor]] = field(default_factory=list)
    decided: list[list[torch.Tensor]] = field(default_factory=list)

    def of(self, output: int) -> list[torch.Tensor]:
        """Returns the answers with other decisions for an output."""
        return [answers[output] for answers in self.decided]


def evaluate(
    subject: Subject, i: int, call: VerifiedCall, before: Sequence[Any], answers: MemberAnswers
) -> Evaluations:
    """Evaluates member i again. Ways that fail are left out.

    before: the outputs of the call that this one follows. answers: the call's answers, for its shapes.
    """
    weights, inputs = subject.arguments(i), subject.with_states(call.inputs[i], before)
    own, found = answers.own[i], Evaluations()

    def run(inputs: Sequence[torch.Tensor]) -> list[Any]:
        with as_torch_computes():
            return list(subject.run(i)(*weights, *inputs))

    ways: list[tuple[list[list[torch.Tensor]], Callable[[], list[list[Any]]]]] = [
        (found.equal, lambda: [_without_onednn(run, inputs)]),
        (found.decided, lambda: near_ties.answers(subject.program(i), weights, inputs)),
    ]
    if _halves_are_equal(subject, i, weights, inputs, answers):
        ways.append((found.equal, lambda: [_in_halves(run, inputs)]))
    for into, way in ways:
        try:
            with torch.inference_mode():
                several = way()
        except (RuntimeError, IndexError, ValueError):
            continue
        for outputs in several:
            if all(isinstance(a, torch.Tensor) and a.shape == o.shape for a, o in zip(outputs, own)):
                into.append(outputs)
    return found


def raise_errors(
    stats: ErrorStats, output: int, rows: Sequence[tuple[Evaluations, torch.Tensor]], bound: float
) -> None:
    """Raises the members' own errors of an output to those of the equal evaluations, within `MOST`.

    rows: for each member and call its evaluations and its float64 answer. bound: a number that is further off
    is a near-tie that was decided otherwise, and does not count.
    """
    most_rms, most = MOST * stats.own_rms, MOST * stats.own_max
    for number in range(max((len(e.equal) for e, _ in rows), default=0)):
        errors = RootMeanSquare()
        for evaluations, truth in rows:
            if number < len(evaluations.equal):
                errors.add(_errors(evaluations.equal[number][output], truth, bound))
        stats.raise_own(min(errors.value, most_rms), min(errors.largest, most))


def own_rms(
    evaluations: Evaluations, output: int, own: torch.Tensor, truth: torch.Tensor, bound: float
) -> float:
    """Returns the largest rms error of one member's equal evaluations in one call, within `MOST`.

    own: the answer of the first evaluation.
    """
    found = [_errors(answers[output], truth, bound) for answers in evaluations.equal]
    largest = max(map(root_mean_square, found), default=0.0)
    return min(largest, MOST * measure("", "", own, own, truth).own)


def nearest(
    wide: torch.Tensor, own: torch.Tensor, truth: torch.Tensor, others: Sequence[torch.Tensor], bound: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the own and the float64 answer that a wide answer is compared with.

    Where an answer with other decisions is further than `bound` from float64 and the wide answer is nearer to
    it, it replaces them. Whole numbers are replaced where the wide answer equals one of these answers.
    """
    if wide.shape != own.shape or wide.dtype != own.dtype:
        return own, truth
    if not floating(own):
        for other in (*others, *([truth] if truth.shape == own.shape else [])):
            own = torch.where(wide == other.to(own.dtype), other.to(own.dtype), own)
        return own, truth
    if truth.shape != own.shape:
        return own, truth
    found, best = wide.to(truth.dtype), truth
    for other in others:
        value = other.to(truth.dtype)
        nearer = ((value - truth).abs() > bound) & ((found - value).abs() < (found - best).abs())
        own, best = torch.where(nearer, other.to(own.dtype), own), torch.where(nearer, value, best)
    return own, best


def _errors(answer: torch.Tensor, truth: torch.Tensor, bound: float) -> torch.Tensor:
    """Returns the errors of the numbers that are finite and within the bound."""
    if not floating(answer) or answer.shape != truth.shape:
        return torch.zeros(0, dtype=torch.float64)
    error = (answer.to(truth.dtype) - truth).abs()
    return error[error <= bound]


def _without_onednn(run: Run, inputs: Sequence[torch.Tensor]) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of settings of Intel GPUs
        with torch.backends.mkldnn.flags(enabled=False):
            return run(inputs)


def _in_halves(run: Run, inputs: Sequence[torch.Tensor]) -> list[Any]:
    half = inputs[0].shape[0] // 2
    parts = [run([x[:half] for x in inputs]), run([x[half:] for x in inputs])]
    return [torch.cat(pair) for pair in zip(*parts)]


def _halves_are_equal(
    subject: Subject, i: int, weights: Sequence[Any], inputs: Sequence[torch.Tensor], answers: MemberAnswers
) -> bool:
    """Returns whether the batch is axis 0 of all inputs and outputs, and its rows are independent."""
    rows = {x.shape[0] if x.dim() else 0 for x in (*inputs, *answers.own[i])}
    if len(rows) != 1 or min(rows) < 2:
        return False

    exact = subject.float64_function(i, weights)
    try:
        whole, halves = exact(inputs), _in_halves(exact, inputs)
    except (RuntimeError, IndexError, ValueError):
        return False
    return all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-9, atol=1e-12, equal_nan=True)
        for a, b in zip(whole, halves)
    )
