"""Measures what approximate weights change in the members' answers.

The error of a member is the rms of the difference between its answers with the artifact's weights and those
with its checkpoint's weights, in float64. The effect of its fine-tuning is the rms of the difference between
the latter and the answers with the base's values of the same weights. A build declares the largest error as a
part of the effect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..errors import VerificationError
from .record import ApproximationError
from .subject import AnsweredCalls, Subject, VerifiedCall, Weights
from .tolerance import RootMeanSquare, floating, reference_of


def measure(
    answered: AnsweredCalls,
    original: Callable[[int], Mapping[str, torch.Tensor]],
    base: Mapping[str, torch.Tensor],
) -> list[ApproximationError]:
    """Measures the errors of all floating outputs over all calls that continue no other call.

    Args:
        answered: The answers of the members with the approximate weights.
        original: Returns the weights of a member's checkpoint that are approximate in the artifact, by name.
        base: The base's values of these weights.

    Returns: a row for each output and member.

    Raises:
        VerificationError: No output is floating, or a member fails with its checkpoint's weights.
    """
    rows = []
    subject = answered.subject
    for i, member in enumerate(subject.members):
        found_errors: dict[int, tuple[RootMeanSquare, RootMeanSquare]] = {}
        ways = [_function(subject, i, weights, answered.float64) for weights in (original(i), base)]
        for call, answers in zip(answered.calls, answered.found):
            if call.after is not None:
                continue
            checkpoint, start = (_answers(way, subject, i, call) for way in ways)
            for k, near in enumerate(answers.truth[i]):
                if floating(answers.own[i][k]):
                    sums = found_errors.setdefault(k, (RootMeanSquare(), RootMeanSquare()))
                    _add(*sums, near, checkpoint[k], start[k])
        for k, (error, effect) in found_errors.items():
            bound = answered.stats[k].rms_bound()
            rows.append(ApproximationError(subject.outputs[k], member, error.value, effect.value, bound))
    if not rows:
        raise VerificationError(
            "no output is a floating number, so what approximate weights change cannot be measured; build"
            " without --tolerance"
        )
    return rows


def _add(
    error: RootMeanSquare,
    effect: RootMeanSquare,
    near: torch.Tensor,
    original: torch.Tensor,
    base: torch.Tensor,
) -> None:
    """Adds the error and the effect of one answer."""
    finite = torch.isfinite(near) & torch.isfinite(original) & torch.isfinite(base)
    error.add((near - original)[finite])
    effect.add((original - base)[finite])


Answer = Callable[[Sequence[torch.Tensor]], Sequence[Any]]


def _function(subject: Subject, i: int, changed: Weights, float64: bool) -> Answer:
    """Returns what computes the outputs of member i with other values of some weights."""
    weights = {**subject.weights(i), **changed}
    arguments = [weights[s.source] for s in subject.program(i).weights]
    if float64:
        return subject.float64_function(i, arguments)
    return lambda inputs: subject.run(i)(*arguments, *inputs)


def _answers(way: Answer, subject: Subject, i: int, call: VerifiedCall) -> list[Any]:
    """Returns the outputs of member i in a first call. Raises: VerificationError if it fails."""
    try:
        with torch.inference_mode():
            return [reference_of(o) for o in way(call.inputs[i])]
    except (RuntimeError, IndexError, ValueError) as error:
        raise VerificationError(
            f"member {subject.members[i]} fails at {call.label} with its checkpoint's weights or the base's:"
            f" {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        ) from error


def check(rows: Sequence[ApproximationError], tolerance: float, entry: str) -> None:
    """Refuses answers whose error is over the declared part of the effect.

    Raises: VerificationError, which names the worst member and output.
    """
    worst = max(rows, key=lambda row: row.part)
    if not worst.part <= tolerance:
        over = len({row.member for row in rows if not row.part <= tolerance})
        raise VerificationError(
            f"{entry}: the approximate weights of member {worst.member} change output {worst.output or '0'}"
            f" by {worst.error:.2e} (rms), which is {worst.part:.3g} of what its fine-tuning changes"
            f" ({worst.effect:.2e}); declared is {tolerance:g}. {over} of {len({row.member for row in rows})}"
            " members are over it. Nothing was written; try another --tolerance, or build without it"
        )


def record(rows: Sequence[ApproximationError], tolerance: float, weights: Sequence[str]) -> dict[str, Any]:
    """Returns the record for the manifest. weights: the names of the approximate weights."""
    outputs: dict[str, dict[str, Any]] = {}
    for row in rows:
        one = outputs.setdefault(row.output, {"output": row.output, "rounding": row.rounding, "members": {}})
        one["members"][row.member] = {"error": row.error, "effect": row.effect}
    return {"tolerance": tolerance, "weights": list(weights), "outputs": list(outputs.values())}
