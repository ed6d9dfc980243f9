"""Reads and writes the record of a build's verification, as the manifest stores it.

The record is JSON whose keys are for people: `wide` has the keys `shared.0`, `each.1` (pattern and number of
the wide program), and `truth` is a sentence that begins with the dtype of the reference. This module alone
parses them. All other code uses `OutputBounds`, `read_bounds` and `has_float64_reference`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from widepack_artifacts.errors import ArtifactError

from ..spec.entries import FORWARD

NOT_FINITE = "not_finite"
"""The record's key for members whose answers are NaN or inf where the answers of other members are finite."""

APPROXIMATION = "approximation"
"""The record's key for what approximate weights change in the answers."""

_FLOAT64 = "float64"
_WITHOUT_FLOAT64 = (
    "float32 (an op has no float64 kernel, or decides otherwise in it); bound 1e-5 of the scale"
)


@dataclass(frozen=True)
class OutputBounds:
    """What the bound of one output is computed from.

    Attributes:
        output: The name of the output; "" for a single one.
        own_max: The largest of the members' own errors.
        own_rms: The rms of the members' own errors.
        scale: The rms of the float64 answers.
    """

    output: str = ""
    own_max: float = 0.0
    own_rms: float = 0.0
    scale: float = 0.0

    def wider(self, other: OutputBounds) -> OutputBounds:
        """Returns bounds that both allow."""
        return OutputBounds(
            self.output,
            max(self.own_max, other.own_max),
            max(self.own_rms, other.own_rms),
            max(self.scale, other.scale),
        )


@dataclass(frozen=True)
class ApproximationError:
    """What approximate weights change in one output of one member.

    output, member: their names. error, effect: root mean squares, in the unit of the output. rounding: the
    bound of the error that is the members' own rounding.
    """

    output: str
    member: str
    error: float
    effect: float
    rounding: float = 0.0

    @property
    def part(self) -> float:
        """The error as a part of the effect of the fine-tuning."""
        if self.error <= self.rounding:
            return 0.0
        return self.error / self.effect if self.effect else math.inf


def program_key(pattern: str, number: int) -> str:
    """Returns the key of a wide program in the record: `shared.0`."""
    return f"{pattern}.{number}"


def reference_text(float64: bool) -> str:
    """Returns the record's value of `truth`. float64: whether the members' float64 answers are the
    reference.
    """
    return _FLOAT64 if float64 else _WITHOUT_FLOAT64


def has_float64_reference(verification: Mapping[str, Any], entry: str) -> bool:
    """Returns whether the members' float64 answers are the reference of an entry, as its build found out."""
    return str(entry_record(verification, entry).get("truth", _FLOAT64)).startswith(_FLOAT64)


def join_records(records: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Joins the records of all entries into the one of the manifest.

    The keys of `forward` are at the top. The records of other entries are under `entries`.
    """
    others = {entry: record for entry, record in records.items() if entry != FORWARD}
    return {**records.get(FORWARD, {}), **({"entries": others} if others else {})}


def entry_record(verification: Mapping[str, Any], entry: str) -> Mapping[str, Any]:
    """Returns one entry's part of joined records; empty if it has none."""
    record = verification if entry == FORWARD else (verification.get("entries") or {}).get(entry)
    return record if isinstance(record, Mapping) else {}


def read_bounds(verification: Mapping[str, Any], entry: str, pattern: str) -> list[OutputBounds] | None:
    """Returns the record of a pattern's first wide program, for each output; None if there is none.

    Raises: ArtifactError if the record does not have the form that a build writes.
    """
    programs = entry_record(verification, entry).get("wide", {})
    if not isinstance(programs, Mapping):
        raise ArtifactError(
            f"verification of {entry}: wide is a {type(programs).__name__}, "
            "but it must be an object with one list for each program"
        )
    rows = next((r for key, r in programs.items() if key.partition(".")[0] == pattern), None)
    if rows is None:
        return None
    if not isinstance(rows, list) or not all(map(_is_row, rows)):
        raise ArtifactError(
            f"verification of {entry}: {pattern} is not a list of records with own_max, own_rms and scale"
        )
    return [
        OutputBounds(
            str(row.get("output") or ""), float(row["own_max"]), float(row["own_rms"]), float(row["scale"])
        )
        for row in rows
    ]


def free_places(verification: Mapping[str, Any], entry: str) -> frozenset[tuple[str, str]]:
    """Returns (member, output) whose NaN and inf may be at other places than in the recorded answers.

    Raises: ArtifactError if the record does not have the form that a build writes.
    """
    rows = entry_record(verification, entry).get(NOT_FINITE, [])
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        raise ArtifactError(f"verification of {entry}: {NOT_FINITE} is not a list of records")
    return frozenset(
        (str(row.get("member")), str(row.get("output"))) for row in rows if row.get("places") == "any"
    )


def _is_row(row: Any) -> bool:
    return isinstance(row, Mapping) and all(
        type(row.get(k)) in (int, float) and row[k] >= 0 for k in ("own_max", "own_rms", "scale")
    )


@dataclass(frozen=True)
class Approximation:
    """What a build recorded of the approximate weights of an entry.

    entry: its name. tolerance: the declared part. weights: the names of the weights. rows: for each output
    and member.
    """

    entry: str
    tolerance: float
    weights: tuple[str, ...]
    rows: tuple[ApproximationError, ...]

    @property
    def worst(self) -> ApproximationError:
        """The row with the largest part."""
        return max(self.rows, key=lambda row: row.part)


def read_approximations(verification: Mapping[str, Any]) -> list[Approximation]:
    """Returns what is recorded of each entry with approximate weights.

    verification: the record of the manifest. Raises: ArtifactError if it does not have the form that a build
    writes.
    """
    others = verification.get("entries") or {}
    if not isinstance(others, Mapping):
        raise ArtifactError("verification: entries is not an object with a record for each entry")
    found = []
    for entry in (FORWARD, *others):
        one = entry_record(verification, entry).get(APPROXIMATION)
        if one is None:
            continue
        try:
            found.append(_approximation(entry, one))
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise ArtifactError(
                f"verification of {entry}: {APPROXIMATION} does not have the form that a build writes"
            ) from error
    return found


def _approximation(entry: str, one: Any) -> Approximation:
    """Reads one record. Raises: TypeError, KeyError, ValueError, AttributeError for another form."""
    rows = tuple(
        ApproximationError(
            str(o["output"]), str(m), _number(v["error"]), _number(v["effect"]), _number(o["rounding"])
        )
        for o in one["outputs"]
        for m, v in o["members"].items()
    )
    tolerance, weights = _number(one["tolerance"]), tuple(one["weights"])
    if not rows or not tolerance < 1 or not all(isinstance(n, str) for n in weights):
        raise ValueError("a tolerance, a name or no row")
    return Approximation(entry, tolerance, weights, rows)


def _number(value: Any) -> float:
    """Returns a number of a record. Raises: ValueError unless it is finite and not negative."""
    found = float(value)
    if not 0 <= found < math.inf:
        raise ValueError(f"{found} is not a finite number from 0")
    return found
