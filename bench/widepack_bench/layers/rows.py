"""The rows of `bench --primitive`, one after the other: in this process, or those of a primitive in a process of its own.

A row that fails does not lose the others, and neither does one whose process dies. A baseline that takes its process with it while it is prepared is left out of its row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from widepack_bench.layers.sweeps import Sweep, find

from .block_sweeps import sweeps
from ..processes.fresh import ProcessEnded, lines_of_fresh_process, tell
from .row import PREPARING, Effort, run_row
from ..suite.compare import reason

Progress = Callable[[str, int, int], None]
ROWS_OF = f"{__name__}:rows_of"


@dataclass(frozen=True, slots=True)
class Task:
    """A row to be measured."""

    sweep: Sweep
    members: int

    @property
    def key(self) -> str:
        return f"{self.sweep.name}, N={self.members}"


class Clock:
    """How far a run is, and how long it will take yet: by what the rows so far took, before the first by a guess."""

    def __init__(self, tasks: Sequence[Task], row_s: float, tune_s: float, progress: Progress | None) -> None:
        self._count, self._row_s, self._progress = len(tasks), row_s + tune_s, progress
        self._of_rows = row_s
        self._done, self._begun = 0, time.monotonic()

    def tuned(self) -> None:
        """All that is to be tuned has been: what comes takes the rows' own time."""
        self._row_s, self._begun = self._of_rows, time.monotonic()

    def left(self) -> str:
        each = (time.monotonic() - self._begun) / self._done if self._done else self._row_s
        seconds = each * (self._count - self._done)
        return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"

    def say(self, task: Task, stage: str) -> None:
        if self._progress is not None:
            self._progress(f"{task.key} ({self._done + 1} of {self._count}, about {self.left()} left): {stage}", 0, 1)

    def done(self) -> None:
        self._done += 1


def rows(tasks: Sequence[Task], preset: str, options: Mapping[str, Any], isolate: bool, clock: Clock) -> Iterator[tuple[Task, dict[str, Any]]]:
    """Each task with its row, or with why there is none under `error`. options: of `run_row`. isolate: a process for each primitive."""
    if not isolate:
        for task in tasks:
            yield task, _one(task, preset, options, partial(clock.say, task))
        return
    for name in dict.fromkeys(t.sweep.name for t in tasks):
        yield from _isolated([t for t in tasks if t.sweep.name == name], preset, options, clock)


def _isolated(tasks: Sequence[Task], preset: str, options: Mapping[str, Any], clock: Clock) -> Iterator[tuple[Task, dict[str, Any]]]:
    """The rows of one primitive."""
    waiting = list(tasks)
    names = list(options["baselines"] or Effort.of(preset).baselines)
    out: dict[str, str] = {}  # the baselines that the first one waiting goes without, and why
    while waiting:
        some = waiting[:1] if out else list(waiting)
        asked = {**options, "baselines": [b for b in names if b not in out]}
        arguments = {"name": tasks[0].sweep.name, "members": [t.members for t in some], "preset": preset, "options": asked}
        stage, why = "", ""
        try:
            for line in lines_of_fresh_process(ROWS_OF, arguments, threads=options["threads"] or 1, steady=True):
                if "stage" in line:
                    stage = line["stage"]
                    clock.say(waiting[0], stage)
                    continue
                row = line["row"]
                if "error" not in row:
                    row["skipped"] |= out
                yield some.pop(0), row
                waiting.pop(0)
                stage = ""
            why = "it gave no row"
        except ProcessEnded as error:
            why = str(error)
        culprit = stage.removeprefix(PREPARING) if stage.startswith(PREPARING) else ""
        if not some:  # whatever its end was, it had given all
            out = {}
        elif culprit and len(asked["baselines"]) > 1:
            out = {**out, culprit: f"its process ended while it was prepared: {why}"}
        else:
            task = waiting.pop(0)
            yield task, {"primitive": task.sweep.name, "members": task.members, "error": f"its process ended: {why}"}
            out = {}


def rows_of(name: str, members: Sequence[int], preset: str, options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows of one primitive, as its own process is asked: `{"row": ...}` each, and `{"stage": ...}` as it goes on."""
    (sweep,) = find(name, sweeps())
    for count in members:
        yield {"row": _one(Task(sweep, count), preset, options, lambda stage: tell({"stage": stage}))}


def _one(task: Task, preset: str, options: Mapping[str, Any], said: Callable[[str], None]) -> dict[str, Any]:
    """A row, or why there is none."""
    try:
        return run_row(task.sweep, task.members, preset, said=said, **options)
    except Exception as error:  # noqa: BLE001  # whatever a layer, a compiler or a strategy raises is this row's result
        return {"primitive": task.sweep.name, "members": task.members, "error": reason(error)}
