"""Runs the rows of `widepack bench-layers` one after the other, in this process or each layer in its own
process.

A row that fails does not stop the others, and neither does a process that ends early. A baseline that ends
the process while it is prepared is left out of its row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from widepack_bench.layers.sweeps import Sweep, find

from ..baselines.members import reason
from ..processes.fresh import ProcessEnded, lines_of_fresh_process, tell
from .block_sweeps import sweeps
from .row import PREPARING, Effort, RowOptions, run_row

Progress = Callable[[str, int, int], None]
ROWS_OF = f"{__name__}:rows_of"


@dataclass(frozen=True, slots=True)
class Task:
    """A row to measure."""

    sweep: Sweep
    members: int

    @property
    def key(self) -> str:
        return f"{self.sweep.name}, N={self.members}"


class Clock:
    """Estimates the remaining time of a run: from the finished rows, or from `row_s` and `tune_s` before the
    first.
    """

    def __init__(self, tasks: Sequence[Task], row_s: float, tune_s: float, progress: Progress | None) -> None:
        self._count, self._row_s, self._progress = len(tasks), row_s + tune_s, progress
        self._measure_s = row_s
        self._done, self._begin = 0, time.monotonic()

    def tuned(self) -> None:
        """Notes that all artifacts are tuned: the remaining rows only measure."""
        self._row_s, self._begin = self._measure_s, time.monotonic()

    def left(self) -> str:
        each = (time.monotonic() - self._begin) / self._done if self._done else self._row_s
        seconds = each * (self._count - self._done)
        return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"

    def show(self, task: Task, stage: str) -> None:
        """Shows the stage of a row, and the remaining time."""
        if self._progress is not None:
            self._progress(
                f"{task.key} ({self._done + 1} of {self._count}, about {self.left()} left): {stage}", 0, 1
            )

    def done(self) -> None:
        self._done += 1


def rows(
    tasks: Sequence[Task], preset: str, options: Mapping[str, Any], isolate: bool, clock: Clock
) -> Iterator[tuple[Task, dict[str, Any]]]:
    """Yields each task with its row. A row that failed has the reason under `error`.

    options: fields of `RowOptions`. isolate: run each layer in its own process.
    """
    if not isolate:
        for task in tasks:
            yield task, _row_or_error(task, preset, options, partial(clock.show, task))
        return
    for name in dict.fromkeys(t.sweep.name for t in tasks):
        yield from _isolated([t for t in tasks if t.sweep.name == name], preset, options, clock)


def _isolated(
    tasks: Sequence[Task], preset: str, options: Mapping[str, Any], clock: Clock
) -> Iterator[tuple[Task, dict[str, Any]]]:
    """Yields the rows of one layer. A new process goes on where the last one ended."""
    waiting = list(tasks)
    names = list(options["baselines"] or Effort.of(preset).baselines)
    left_out: dict[str, str] = {}  # Baselines that ended the process of the first waiting task, with reasons.
    while waiting:
        some = waiting[:1] if left_out else list(waiting)
        baselines = [b for b in names if b not in left_out]
        arguments = {
            "name": tasks[0].sweep.name,
            "members": [t.members for t in some],
            "preset": preset,
            "options": {**options, "baselines": baselines},
        }
        stage, why = "", ""
        try:
            for line in lines_of_fresh_process(
                ROWS_OF, arguments, threads=options["threads"] or 1, steady=True
            ):
                if "stage" in line:
                    stage = line["stage"]
                    clock.show(waiting[0], stage)
                    continue
                row = line["row"]
                if "error" not in row:
                    row["skipped"] |= left_out
                yield some.pop(0), row
                waiting.pop(0)
                stage = ""
            why = "it gave no row"
        except ProcessEnded as error:
            why = str(error)
        culprit = stage.removeprefix(PREPARING) if stage.startswith(PREPARING) else ""
        if not some:  # The process had given all its rows before it ended.
            left_out = {}
        elif culprit and len(baselines) > 1:
            left_out = {**left_out, culprit: f"its process ended while it was prepared: {why}"}
        else:
            task = waiting.pop(0)
            yield (
                task,
                {"primitive": task.sweep.name, "members": task.members, "error": f"its process ended: {why}"},
            )
            left_out = {}


def rows_of(
    name: str, members: Sequence[int], preset: str, options: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yields the rows of one layer as `{"row": ...}`, in the process that `rows` starts.

    The process also writes `{"stage": ...}` lines while a row runs.
    """
    (sweep,) = find(name, sweeps())
    for count in members:
        row = _row_or_error(Task(sweep, count), preset, options, lambda stage: tell({"stage": stage}))
        yield {"row": row}


def _row_or_error(
    task: Task, preset: str, options: Mapping[str, Any], on_stage: Callable[[str], None]
) -> dict[str, Any]:
    """Returns a row, or the reason why it failed under `error`."""
    try:
        return run_row(task.sweep, task.members, preset, options=RowOptions(**options), on_stage=on_stage)
    except Exception as error:  # noqa: BLE001  # whatever a layer, a compiler or a strategy raises is this row's result
        return {"primitive": task.sweep.name, "members": task.members, "error": reason(error)}
