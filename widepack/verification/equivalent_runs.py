"""Estimates a member's own rounding error from several equivalent evaluations, after a first check failed.

One evaluation of a member is a small sample of its rounding error, and float32 may decide a near-tie (the
nearest code of a quantiser, the winner of a topk) otherwise than float64. So before an answer is called
wrong, each member is evaluated again:

| evaluation | what it changes | counts for |
|---|---|---|
| oneDNN off | the kernels of convolutions and linear layers | the own error, near-ties |
| channels last | the memory format of images and of weights of convolutions | the own error, near-ties |
| `COPIES` copies at once, by vmap | the kernels of single numbers | the own error, near-ties |
| the batch in two halves | the blocks of sums; only if rows are independent | the own error, near-ties |
| `NUDGES` times each number nudged by at most `ULPS` ulp | every rounding | near-ties |

1. The own error is the largest of these evaluations. The factors of the bound do not change.
2. Where an evaluation is out of bounds itself, a near-tie was decided otherwise. A wide answer is right there
   if it is within the bound of that evaluation or of float64.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree

from ..ir.float64 import raise_value
from ..ir.torch_internals import without_fallback_warnings
from .subject import MemberAnswers, Subject, VerifiedCall
from .tolerance import ErrorStats, floating

COPIES = 16
NUDGES = 16
ULPS = 4

Run = Callable[[Sequence[Any], Sequence[torch.Tensor]], list[Any]]


@dataclass
class Evaluations:
    """The outputs of equivalent evaluations of one member in one call.

    Attributes:
        equal: Those of the same numbers: for each evaluation its outputs.
        nudged: Those of nudged numbers.
    """

    equal: list[list[torch.Tensor]] = field(default_factory=list)
    nudged: list[list[torch.Tensor]] = field(default_factory=list)

    def of(self, output: int) -> list[torch.Tensor]:
        """Returns the answers of all evaluations for an output."""
        return [answers[output] for answers in (*self.equal, *self.nudged)]


def evaluate(
    subject: Subject, i: int, call: VerifiedCall, before: Sequence[Any], answers: MemberAnswers
) -> Evaluations:
    """Evaluates member i again in equivalent ways. Ways that fail are left out.

    before: the outputs of the call that this one follows. answers: the call's answers, for its shapes.
    """
    weights, inputs = subject.arguments(i), subject.with_states(call.inputs[i], before)
    own, found = answers.own[i], Evaluations()

    def run(weights: Sequence[Any], inputs: Sequence[torch.Tensor]) -> list[Any]:
        return list(subject.run(i)(*weights, *inputs))

    ways: list[tuple[list[list[torch.Tensor]], Callable[[], list[Any]]]] = [
        (found.equal, lambda: _without_onednn(run, weights, inputs)),
        (found.equal, lambda: run(_channels_last(weights), _channels_last(inputs))),
        (found.equal, lambda: _copies_at_once(run, weights, inputs)),
    ]
    if _halves_are_equal(subject, i, weights, inputs, answers):
        ways.append((found.equal, lambda: _in_halves(run, weights, inputs)))
    for seed in range(NUDGES):
        ways.append((found.nudged, lambda s=seed: run(*_nudged(weights, inputs, s))))  # type: ignore[misc]
    for into, way in ways:
        try:
            with torch.inference_mode():
                outputs = way()
        except (RuntimeError, IndexError, ValueError):
            continue
        if all(isinstance(a, torch.Tensor) and a.shape == o.shape for a, o in zip(outputs, own)):
            into.append(outputs)
    return found


def raise_errors(
    stats: ErrorStats, output: int, rows: Sequence[tuple[Evaluations, torch.Tensor]], bound: float
) -> None:
    """Raises the members' own errors of an output to those of the equivalent evaluations.

    rows: for each member and call its evaluations and its float64 answer. bound: a number that is further off
    is a near-tie that was decided otherwise, and does not count.
    """
    for number in range(max((len(e.equal) for e, _ in rows), default=0)):
        square, count, largest = 0.0, 0, 0.0
        for evaluations, truth in rows:
            if number < len(evaluations.equal):
                error = _errors(evaluations.equal[number][output], truth, bound)
                if error.numel():
                    square += float(error.square().sum())
                    count += error.numel()
                    largest = max(largest, float(error.max()))
        if count:
            stats.raise_own(math.sqrt(square / count), largest)


def own_rms(evaluations: Evaluations, output: int, truth: torch.Tensor, bound: float) -> float:
    """Returns the largest rms error of one member's equivalent evaluations in one call."""
    found = [_errors(answers[output], truth, bound) for answers in evaluations.equal]
    return max((float(e.square().mean().sqrt()) for e in found if e.numel()), default=0.0)


def nearest(
    wide: torch.Tensor,
    own: torch.Tensor,
    truth: torch.Tensor,
    others: Sequence[torch.Tensor],
    bound: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the own and the float64 answer that a wide answer is compared with.

    Where an evaluation is further than `bound` from float64 and the wide answer is nearer to it, the
    evaluation replaces them. Whole numbers are replaced where the wide answer equals an evaluation.
    """
    if wide.shape != own.shape or wide.dtype != own.dtype:
        return own, truth
    if not floating(own):
        for other in (*others, *([truth.to(own.dtype)] if truth.shape == own.shape else [])):
            own = torch.where(wide == other, other, own)
        return own, truth
    if truth.shape != own.shape:
        return own, truth
    found, best = wide.to(truth.dtype), truth
    for other in others:
        value = other.to(truth.dtype)
        nearer = ((value - truth).abs() > bound) & ((found - value).abs() < (found - best).abs())
        own, best = torch.where(nearer, other, own), torch.where(nearer, value, best)
    return own, best


def _errors(answer: torch.Tensor, truth: torch.Tensor, bound: float) -> torch.Tensor:
    """Returns the errors of the numbers that are finite and within the bound."""
    if not floating(answer) or answer.shape != truth.shape:
        return torch.zeros(0, dtype=torch.float64)
    error = (answer.to(truth.dtype) - truth).abs()
    return error[error <= bound]


def _without_onednn(run: Run, weights: Sequence[Any], inputs: Sequence[torch.Tensor]) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of settings of Intel GPUs
        with torch.backends.mkldnn.flags(enabled=False):
            return run(weights, inputs)


def _channels_last(values: Sequence[Any]) -> list[Any]:
    def other(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dim() == 4:
            return value.contiguous(memory_format=torch.channels_last)
        return value

    return [pytree.tree_map(other, v) for v in values]


def _copies_at_once(run: Run, weights: Sequence[Any], inputs: Sequence[torch.Tensor]) -> list[Any]:
    """Returns the outputs of the first of several equal copies, which vmap evaluates at once."""
    values = [*weights, *inputs]
    if not all(isinstance(v, torch.Tensor) for v in values):
        raise ValueError("only tensors have copies")
    copies = [v.expand(COPIES, *v.shape).clone() for v in values]
    count = len(weights)
    with torch.inference_mode(False), torch.no_grad(), without_fallback_warnings():
        outputs = torch.func.vmap(lambda *v: tuple(run(v[:count], v[count:])))(*map(torch.clone, copies))
    return [y[0] for y in outputs]


def _in_halves(run: Run, weights: Sequence[Any], inputs: Sequence[torch.Tensor]) -> list[Any]:
    half = inputs[0].shape[0] // 2
    parts = [run(weights, [x[:half] for x in inputs]), run(weights, [x[half:] for x in inputs])]
    return [torch.cat(pair) for pair in zip(*parts)]


def _halves_are_equal(
    subject: Subject,
    i: int,
    weights: Sequence[Any],
    inputs: Sequence[torch.Tensor],
    answers: MemberAnswers,
) -> bool:
    """Returns whether the batch is axis 0 of all inputs and outputs, and its rows are independent."""
    rows = {x.shape[0] if x.dim() else 0 for x in (*inputs, *answers.own[i])}
    if len(rows) != 1 or min(rows) < 2:
        return False

    def exact(weights: Sequence[Any], inputs: Sequence[torch.Tensor]) -> list[Any]:
        doubles = [raise_value(v) for v in (*weights, *inputs)]
        return list(subject.run(i, exact=True)(*doubles))

    try:
        with torch.inference_mode():
            whole, halves = exact(weights, inputs), _in_halves(exact, weights, inputs)
    except (RuntimeError, IndexError, ValueError):
        return False
    return all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-9, atol=1e-12, equal_nan=True)
        for a, b in zip(whole, halves)
    )


def _nudged(weights: Sequence[Any], inputs: Sequence[torch.Tensor], seed: int) -> tuple[list[Any], list[Any]]:
    """Returns the numbers with each floating one changed by at most `ULPS` ulp."""
    generator = torch.Generator().manual_seed(seed)

    def other(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        draw = torch.rand(value.shape, generator=generator, dtype=torch.float32) * 2 - 1
        return value * (1 + ULPS * torch.finfo(value.dtype).eps * draw.to(value.dtype))

    return pytree.tree_map(other, list(weights)), pytree.tree_map(other, list(inputs))


def evaluations_of(
    subject: Subject,
    pattern: str,
    calls: Sequence[VerifiedCall],
    found: Sequence[MemberAnswers],
    members: Sequence[int],
) -> Iterator[tuple[int, int, Evaluations]]:
    """Yields (number of the call, member, its evaluations) for the calls of a pattern."""
    for number, call in enumerate(calls):
        if call.pattern == pattern:
            for i in members:
                before = found[call.after].own[i] if call.after is not None else ()
                yield number, i, evaluate(subject, i, call, before, found[number])
