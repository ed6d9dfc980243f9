"""`bench --primitive`: row after row, the rows of a primitive in a process of their own, into one JSON document that a later run goes on with.

A row that fails does not lose the others, and neither does one whose process dies. The small rows of the preset `ci` run in this process.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from widepack.errors import UsageError
from widepack.loading import on_device
from widepack.single import admit
from widepack.sweeps import MEMBERS, Sweep, find

from .baselines import BASELINES
from .block_sweeps import sweeps
from .fresh import STEADY, ProcessEnded, lines_of_fresh_process
from .primitive_row import Effort, run_row
from .primitive_table import measured, summary
from .report import environment
from .suite import reason
from .suite_run import write_whole
from .text import plural

FORMAT = "widepack.primitives/1"
NATIVE = "onnxruntime"
TUNE_S = 25.0  # of building and tuning a row, roughly
MOST = 4096  # members: each is a module of its own, whose answers are held to float64
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Task:
    """A row to be measured."""

    sweep: Sweep
    members: int

    @property
    def key(self) -> str:
        return f"{self.sweep.name}, N={self.members}"


def run_primitives(
    asked: str,
    preset: str = "quick",
    *,
    members: Sequence[int] = (),
    out: Path | None = None,
    resume: Path | None = None,
    baselines: Sequence[str] = (),
    pattern: str = "each",
    device: str = "cpu",
    threads: int | None = None,
    pin: bool = False,
    budget_s: float | None = None,
    compiled: bool = False,
    tune: bool = False,
    jobs: int = 1,
    artifacts: Path | None = None,
    isolate: bool | None = None,
    progress: Progress | None = None,
    said: Callable[[str], object] = lambda text: None,
) -> dict[str, Any]:
    """Measure primitives by name, and say each row as it is done.

    asked: as `sweeps.find` takes it. members: other N than the preset's. out: the document, written after every row. resume: one to go on with (and in, without out);
    rows that it has and that were not noisy are not run again. tune, artifacts: as in `run_row`. jobs: primitives that are tuned at once, each in a process of its own, all before
    anything is timed. isolate: a process for each primitive; by default for all presets but `ci`. The rest is as in `run_row`.
    threads: one where they are not given. Returns: the document; where it was interrupted, `interrupted` is true in it. Raises: UsageError.
    """
    counts = dict.fromkeys(members or MEMBERS[preset])
    if max(counts) > MOST:
        raise UsageError(f"{max(counts)} members are more than this takes ({MOST})")
    if unknown := [b for b in baselines if b not in BASELINES]:
        raise UsageError(f"unknown baseline {', '.join(map(repr, unknown))}; known: {', '.join(BASELINES)}")
    on_device(device)
    tasks = [Task(s, n) for s in find(asked, sweeps()) for n in counts]
    document = _read(resume, preset, pattern, tune) if resume is not None else _new(preset, pattern, tune)
    threads = threads or 1
    where = environment(device, threads)
    if document["rows"]:
        _same_place(resume, document["environment"], where)
    isolate = preset != "ci" if isolate is None else isolate
    document |= {"environment": {**where, "memory": STEADY if isolate else {}}, "interrupted": False}
    out = out or resume
    if out is not None:  # before anything is measured that could not be kept
        admit(out, force=True)
        try:
            write_whole(out, document)
        except OSError as error:
            raise UsageError(f"{out} cannot be written ({error.strerror}); give another path") from error
    options = {
        "baselines": list(baselines),
        "pattern": pattern,
        "device": device,
        "threads": threads,
        "pin": pin,
        "budget_s": budget_s,
        "compiled": compiled,
        "tune": tune,
        "artifacts": str(artifacts.absolute()) if artifacts is not None else "",
    }
    waiting = [t for t in tasks if not measured(document["rows"].get(t.key))]
    clock = _Clock(waiting, Effort.of(preset).row_s + (TUNE_S if tune else 0.0), progress)
    said(f"{plural(len(waiting), 'row')}{f' of {len(tasks)}, the others are there' if len(waiting) < len(tasks) else ''}, about {clock.left()}")
    try:
        with ExitStack() as stack:
            if tune and artifacts is None:
                options["artifacts"] = stack.enter_context(tempfile.TemporaryDirectory(prefix="widepack-tuned-"))
            if tune and jobs > 1:
                _tune_all(waiting, preset, options, jobs, progress)
                clock.begin()
            for task, row in _rows(waiting, preset, options, isolate, clock):
                document["rows"][task.key] = row
                document["summary"] = summary(document["rows"])
                if out is not None:
                    write_whole(out, document)
                clock.done()
    except KeyboardInterrupt:
        document["interrupted"] = True
    document["summary"] = summary(document["rows"])
    if out is not None:
        write_whole(out, document)
    return document


class _Clock:
    """How far a run is, and how long it will take yet: by what the rows so far took, before the first by a guess."""

    def __init__(self, tasks: Sequence[Task], row_s: float, progress: Progress | None) -> None:
        self._count, self._row_s, self._progress = len(tasks), row_s, progress
        self._done, self._begun = 0, time.monotonic()

    def begin(self) -> None:
        """What went before took no row's time."""
        self._begun = time.monotonic()

    def left(self) -> str:
        each = (time.monotonic() - self._begun) / self._done if self._done else self._row_s
        seconds = each * (self._count - self._done)
        return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"

    def say(self, task: Task, stage: str) -> None:
        if self._progress is not None:
            self._progress(f"{task.key} ({self._done + 1} of {self._count}, about {self.left()} left): {stage}", 0, 1)

    def done(self) -> None:
        self._done += 1


def _tune_all(tasks: Sequence[Task], preset: str, options: Mapping[str, Any], jobs: int, progress: Progress | None) -> None:
    """Build and tune every task's artifact, so many primitives at once. What fails here is tried again by its row, which says why."""
    done = 0

    def tune(name: str) -> None:
        nonlocal done
        members = [t.members for t in tasks if t.sweep.name == name]
        arguments = {"name": name, "members": members, "preset": preset, "options": dict(options)}
        try:
            for line in lines_of_fresh_process("widepack_bench.tuned_layer:tuned_of", arguments, threads=options["threads"] or 1, steady=True):
                done += 1
                if progress is not None:
                    failed = f" failed: {line['error']}" if "error" in line else ""
                    progress(f"tuned {name}, N={line['members']}{failed}", done, len(tasks))
        except ProcessEnded:
            return

    with ThreadPoolExecutor(jobs) as pool:
        try:
            for finished in [pool.submit(tune, name) for name in dict.fromkeys(t.sweep.name for t in tasks)]:
                finished.result()
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise


def _rows(tasks: Sequence[Task], preset: str, options: Mapping[str, Any], isolate: bool, clock: _Clock) -> Iterator[tuple[Task, dict[str, Any]]]:
    """Each task with its row, or with `{"error": why}`."""
    if not isolate:
        for task in tasks:
            yield task, _one(task, preset, options, lambda stage, task=task: clock.say(task, stage))  # type: ignore[misc]
        return
    for name in dict.fromkeys(t.sweep.name for t in tasks):
        waiting = [t for t in tasks if t.sweep.name == name]
        without: str = ""  # why ONNX Runtime's sessions are no baseline of the first one waiting
        while waiting:
            some = waiting[:1] if without else waiting
            arguments = {
                "name": name,
                "members": [t.members for t in some],
                "preset": preset,
                "options": _without(options, preset) if without else options,
            }
            try:
                for line in lines_of_fresh_process(f"{__name__}:rows_of", arguments, threads=options["threads"] or 1, steady=True):
                    if "stage" in line:
                        clock.say(waiting[0], line["stage"])
                    else:
                        if without and "error" not in line["row"]:
                            line["row"]["skipped"][NATIVE] = without
                        without = ""
                        yield waiting.pop(0), line["row"]
            except ProcessEnded as error:
                if not without and len(_baselines(options, preset)) > 1 and NATIVE in _baselines(options, preset):
                    without = f"a process with it among the baselines ended: {error}"
                else:
                    yield waiting.pop(0), {"error": f"its process ended: {error}"}
                    without = ""


def _baselines(options: Mapping[str, Any], preset: str) -> Sequence[str]:
    return options["baselines"] or Effort.of(preset).baselines


def _without(options: Mapping[str, Any], preset: str) -> dict[str, Any]:
    """The same without the baseline that runs in native code of its own, which may take the process with it."""
    return {**options, "baselines": [b for b in _baselines(options, preset) if b != NATIVE]}


def rows_of(name: str, members: Sequence[int], preset: str, options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows of one primitive, as its own process is asked: `{"stage": ...}` before each, then `{"row": ...}`."""
    (sweep,) = find(name, sweeps())
    for count in members:
        yield {"stage": "in a process of its own"}
        yield {"row": _one(Task(sweep, count), preset, options, lambda stage: None)}


def _one(task: Task, preset: str, options: Mapping[str, Any], said: Callable[[str], None]) -> dict[str, Any]:
    """A row, or why there is none."""
    try:
        return run_row(task.sweep, task.members, preset, said=said, **options)
    except Exception as error:  # noqa: BLE001  # whatever a layer, a compiler or a strategy raises is this row's result
        return {"primitive": task.sweep.name, "members": task.members, "error": reason(error)}


def _new(preset: str, pattern: str, tune: bool) -> dict[str, Any]:
    return {"format": FORMAT, "preset": preset, "pattern": pattern, "tuned": tune, "environment": {}, "rows": {}, "summary": {}}


def _read(path: Path, preset: str, pattern: str, tune: bool) -> dict[str, Any]:
    """The document to go on with. Raises: UsageError for a file that is something else, or of another preset."""
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return _new(preset, pattern, tune)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as JSON ({error}); give another path, or remove it") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise UsageError(f"{path} is no document of bench --primitive ({FORMAT}); give another path")
    rows = document.get("rows")
    if not isinstance(rows, dict) or not all(isinstance(row, dict) and ("error" in row or "verdict" in row) for row in rows.values()):
        raise UsageError(f"{path} is damaged: it says {FORMAT} and its rows are not what such a document has; give another path, or remove it")
    if document.get("tuned", False) is not tune:
        raise UsageError(f"{path} holds rows {'with' if document.get('tuned') else 'without'} --tune; give each its own file")
    for key, wanted in (("preset", preset), ("pattern", pattern)):
        if document.get(key) != wanted:
            raise UsageError(f"{path} holds rows of the {key} {document.get(key)!r}, this run is for {wanted!r}; give each its own file")
    return document


def _same_place(path: Path | None, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse rows of one place beside those of another: a document has one environment. Raises: UsageError."""
    other = [f"{key} {before.get(key)} and now {now[key]}" for key in ("device", "threads") if before.get(key) != now[key]]
    if other:
        raise UsageError(f"{path} holds rows measured elsewhere: {', '.join(other)}; give each its own file")
