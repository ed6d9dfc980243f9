"""Measures what int8 weights change in the members' answers, on the inputs of the probe.

The error of an output is the difference from the float64 answer that the artifact recorded, as a part of the
rms of that answer. It is measured for each member and each output. It is not a rounding error: it
grows with the distance of the weights from their int8 numbers. So a load declares it, and a user may
limit it.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import VerificationError
from . import probe
from .tolerance import floating, root_mean_square, same_places


@dataclass(frozen=True)
class WeightError:
    """What int8 weights change in one output of one member, on the inputs of the probe.

    Attributes:
        entry: The entry.
        pattern: `shared` or `each`.
        output: The output's name, or its number.
        member: The member's name.
        largest: The largest difference from the float64 answer, divided by the rms of that answer. For an
            output of integers or truth values it is the part of the numbers that differ. It is `inf` if
            NaN or inf are at other places than in the float64 answer.
        rms: The rms of the differences, divided in the same way.

    Example:
        >>> ens = widepack.load("ens.wide", weights="int8")
        >>> max(e.largest for e in ens.weight_errors)
    """

    __module__ = "widepack"  # pickles name the public place

    entry: str
    pattern: str
    output: str
    member: str
    largest: float
    rms: float

    def __str__(self) -> str:
        return (
            f"{self.entry}, {self.pattern}, output {self.output}, member {self.member}: largest "
            f"{self.largest:.2e}, rms {self.rms:.2e} of the answer's rms"
        )


def measure(
    entry: str,
    pattern: str,
    recorded: Mapping[str, Tensor],
    prefix: str,
    outputs: Sequence[Any],
    kinds: Sequence[str],
    names: Sequence[str],
    members: Mapping[int, str],
    anywhere: Container[tuple[int, int]] = (),
) -> list[WeightError]:
    """Measures the errors of all outputs and members.

    Args:
        entry, pattern: What the answers are of.
        recorded: The answers of the probe, by name.
        prefix: What the names of the answers begin with.
        outputs: The program's answers to the inputs of the probe.
        kinds: The kind of each output.
        names: The name of each output.
        members: The name of each member by its number in the artifact, in the order of the answers.
        anywhere: (member, output) whose NaN and inf may be at any place.

    Raises:
        ProbeError: An answer is missing, or of another size.
    """
    rows = []
    numbers = probe.compared(recorded, prefix, outputs, kinds, names, members, anywhere)
    for k, i, value, truth in numbers:
        largest, rms = _errors(value, truth)
        rows.append(WeightError(entry, pattern, names[k], members[i], largest, rms))
    return rows


def _errors(value: Tensor, truth: Tensor) -> tuple[float, float]:
    """Returns the largest error and the rms of the errors, as parts of the rms of the recorded answer."""
    flat = value.to(truth.dtype)
    if not truth.numel():
        return 0.0, 0.0
    if not floating(value):
        part = float((flat != truth).double().mean())
        return part, part
    if not same_places(flat, truth):
        return math.inf, math.inf
    finite = torch.isfinite(truth)
    if not bool(finite.any()):
        return 0.0, 0.0
    errors, scale = (flat[finite] - truth[finite]).abs(), root_mean_square(truth[finite])
    largest, rms = float(errors.max()), root_mean_square(errors)
    if scale == 0.0:
        return (math.inf, math.inf) if largest else (0.0, 0.0)
    return largest / scale, rms / scale


def check(rows: Iterable[WeightError], most: float | None) -> None:
    """Refuses errors over a limit. most: the limit of `largest`; None for no limit.

    Raises: VerificationError, which names the worst member and output.
    """
    rows = list(rows)
    over = [row for row in rows if most is not None and not row.largest <= most]
    if over:
        worst = max(over, key=lambda row: row.largest)
        raise VerificationError(
            f"weights='int8' changes output {worst.output!r} of member {worst.member!r} (entry {worst.entry},"
            f" pattern {worst.pattern}) by up to {worst.largest:.3g} of the answer's rms; max_error is"
            f" {most:g}. {len({row.member for row in over})} of {len({row.member for row in rows})} members"
            " are over it. Load without weights, or with a larger max_error"
        )
