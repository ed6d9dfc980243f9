"""Carries a move out and times it against the call of now, in one interleaved run.

A gain is the time of now over the time after the move. The moves that are faster in a first run are timed
again: the second run gives the gain, so that the choice does not favour random errors.
"""

from __future__ import annotations

import statistics
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from widepack.errors import WidepackError
from widepack.ir.torch_internals import without_fast_path

from ..baselines.members import reason
from ..errors import BenchError
from ..measure.race import OURS, Call, Interval, median_interval, race
from .environment_moves import seconds_apart
from .move import Move, Opened
from .report import GAIN, MeasuredMove
from .subject import AdvisedArtifact

HOPELESS = 0.8
"""A move with a smaller predicted gain is not tried."""
PAIRS = 7
"""Pairs of processes, for moves that only set variables."""
CHILD_LIMIT_S = 120.0
NOW = "now"


@dataclass(frozen=True, slots=True)
class Timed:
    gain: Interval
    quiet: bool
    ms: float


def tried(subject: AdvisedArtifact, move: Move, number: int, budget_s: float) -> MeasuredMove:
    """Tries a move. Its outcome is in the result; nothing is raised for a move that fails.

    Args:
        subject: What is there now.
        move: The move.
        number: Its number in the table.
        budget_s: Seconds of one run.
    """
    predicted = _predicted_gain(subject, move)
    row = MeasuredMove(number=number, name=move.name, how=move.how, predicted=predicted)
    if predicted is not None and predicted < HOPELESS:
        return replace(row, outcome="not tried", reason=f"predicted {predicted:.2f} times as fast")
    try:
        if move.open is None:
            return _apart(subject, move, row)
        opened = move.open(subject)
        if row.predicted is None:
            row = replace(row, predicted=_gain(subject, opened.seconds))
        return _timed_twice(subject, opened, row, budget_s)
    except Exception as e:  # noqa: BLE001  # compilers and runtimes raise errors of any class
        return replace(row, outcome="not possible", reason=reason(e))


def _predicted_gain(subject: AdvisedArtifact, move: Move) -> float | None:
    """Returns the predicted gain; None where a size depends on values, or the move cannot be lowered."""
    with suppress(WidepackError, RuntimeError):
        return _gain(subject, move.predict(subject))
    return None


def _gain(subject: AdvisedArtifact, after: float | None) -> float | None:
    now = subject.seconds(subject.entry)
    return now / after if now and after else None


def _timed_twice(
    subject: AdvisedArtifact, opened: Opened, row: MeasuredMove, budget_s: float
) -> MeasuredMove:
    with opened.within(), without_fast_path():
        if wrong := subject.wrong(opened.answers(), other_dtype=opened.other_dtype):
            return replace(row, outcome="wrong", reason=wrong)
    first = _timed(subject, opened, budget_s)
    row = replace(row, gain=first.gain, ms=first.ms)
    if first.gain.value < GAIN:
        return replace(row, outcome="rejected", reason=f"less than {GAIN:g} times as fast")
    second = _timed(subject, opened, budget_s)
    row = replace(row, gain=second.gain, ms=second.ms)
    if not second.quiet:
        return replace(row, outcome="noisy", reason="other programs disturbed the measurement")
    if second.gain.low <= 1.0 or second.gain.value < GAIN:
        return replace(row, outcome="rejected", reason=f"less than {GAIN:g} times as fast in a second run")
    return replace(row, outcome="recommended", reason="")


def _timed(subject: AdvisedArtifact, opened: Opened, budget_s: float) -> Timed:
    now = subject.call(subject.entry)
    if opened.threads:
        call, now = _with_threads(opened.call, opened.threads), _with_threads(now, subject.work.threads)
    else:
        call = opened.call
    with opened.within():
        found = race(call, {NOW: now}, budget_s=budget_s, limit_s=2 * budget_s)
    return Timed(found.ratio(NOW), found.quiet, found.median_ms(OURS))


def _with_threads(call: Call, threads: int) -> Call:
    def run() -> object:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        return call()

    return run


def _apart(subject: AdvisedArtifact, move: Move, row: MeasuredMove) -> MeasuredMove:
    """Times a move that only sets variables, in pairs of processes."""
    if row.predicted is not None and row.predicted < 1.02:
        return replace(row, outcome="not tried", reason="no result is large enough for it")
    ratios, times = [], []
    try:
        for _ in range(PAIRS):
            now = seconds_apart(subject.work, {}, CHILD_LIMIT_S)
            times.append(seconds_apart(subject.work, dict(move.environment), CHILD_LIMIT_S))
            ratios.append(now / times[-1])
    except BenchError as e:
        return replace(row, outcome="not possible", reason=str(e))
    gain = median_interval(ratios)
    row = replace(row, gain=gain, ms=1e3 * statistics.median(times))
    if gain.low <= 1.0 or gain.value < GAIN:
        return replace(row, outcome="rejected", reason=f"less than {GAIN:g} times as fast")
    return replace(row, outcome="recommended", reason="")
