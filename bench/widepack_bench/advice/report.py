"""Defines the advice: every move with its predicted and its measured gain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ..measure.race import Interval
from ..text import columns, duration

GAIN = 1.05
"""A move is recommended if calls are at least this many times as fast."""
UNDECIDED = ("noisy", "not possible", "out of time")
"""Outcomes that say nothing about the gain of a move."""
Outcome = Literal["recommended", "rejected", "wrong", "noisy", "not tried", "not possible", "out of time"]


@dataclass(frozen=True, kw_only=True)
class MeasuredMove:
    """A move and what came of it.

    Attributes:
        number: Its number in the table, for `--apply`.
        name: A short name.
        how: The command or the call.
        predicted: How many times as fast calls are predicted to be; None without a prediction.
        gain: How many times as fast they are, with its 95% interval; None if it was not measured.
        ms: Milliseconds of a call after the move.
        outcome: Whether it is recommended.
        reason: Why not; empty if it is.
    """

    number: int
    name: str
    how: str
    predicted: float | None
    gain: Interval | None = None
    ms: float | None = None
    outcome: Outcome = "not tried"
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """Returns the move as JSON values."""
        return {**asdict(self), "gain": None if self.gain is None else self.gain.to_json()}


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What would make the calls of an artifact faster on this machine.

    Attributes:
        path, entry, pattern, batch, members, threads: What was called.
        ms: Milliseconds of a call as it is now.
        plan: The plan of now, as strategies with their numbers of nodes.
        ladder: Milliseconds of a call at each level of `widepack bench --levels`, and of the members in turn.
        predicted_ms: Predicted milliseconds, of now and of the loop.
        moves: Every move, in the order of `--apply`.
        sizes: The size of each named dim; empty if all sizes are fixed.
        environment: The machine and the versions.
    """

    path: str
    entry: str
    pattern: str
    batch: int
    members: int
    threads: int
    ms: float
    plan: Mapping[str, int]
    ladder: Mapping[str, float]
    predicted_ms: Mapping[str, float]
    moves: tuple[MeasuredMove, ...]
    sizes: Mapping[str, int] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)

    @property
    def recommended(self) -> tuple[MeasuredMove, ...]:
        """The recommended moves, the fastest first."""
        found = [m for m in self.moves if m.outcome == "recommended" and m.gain is not None]
        return tuple(sorted(found, key=lambda m: -(m.gain.value if m.gain else 0.0)))

    def to_json(self) -> dict[str, Any]:
        """Returns the advice as JSON values."""
        return {
            "format": "widepack.advice/1",
            "environment": dict(self.environment),
            "artifact": self.path,
            "entry": self.entry,
            "pattern": self.pattern,
            "batch": self.batch,
            "members": self.members,
            "threads": self.threads,
            "sizes": dict(self.sizes),
            "ms": self.ms,
            "plan": dict(self.plan),
            "ladder_ms": dict(self.ladder),
            "predicted_ms": dict(self.predicted_ms),
            "moves": [m.to_json() for m in self.moves],
        }

    def table(self) -> str:
        """Returns the advice as text."""
        threads = f"{self.threads} thread{'' if self.threads == 1 else 's'}"
        strategies = ", ".join(f"{k} {n}" for k, n in self.plan.items())
        sizes = f"batch {self.batch}" if self.sizes else "fixed sizes"
        head = (
            f"{self.path}: {self.members} members, {self.pattern}, {sizes}, {threads}: "
            f"{duration(self.ms)} a call ({strategies})"
        )
        ladder = []
        for name, ms in self.ladder.items():
            predicted = self.predicted_ms.get(name)
            cells = [name, duration(ms), f"{self.ms / ms:.2f}x", duration(predicted) if predicted else ""]
            ladder.append(cells)
        rows = [
            [
                str(m.number),
                m.name,
                "" if m.predicted is None else f"{m.predicted:.2f}x",
                "" if m.gain is None else f"{m.gain}x",
                m.outcome,
            ]
            for m in self.moves
        ]
        lines = [head, "", *columns([["level", "a call", "speed over now", "predicted"], *ladder]), ""]
        if rows:
            lines += columns([["#", "move", "predicted", "measured", "outcome"], *rows])
        reasons = [f"{m.number}: {m.reason}" for m in self.moves if m.reason]
        lines += ["", *reasons] if reasons else []
        return "\n".join([*lines, "", *self._advice()])

    def _advice(self) -> list[str]:
        found = self.recommended
        open_ = sum(m.outcome in UNDECIDED for m in self.moves)
        if not found and open_:
            return [f"no move is confirmed; {open_} of {len(self.moves)} could not be measured"]
        if not found:
            return ["no move makes these calls faster"]
        return [f"recommended, {m.gain}x as fast: {m.how}" for m in found]
