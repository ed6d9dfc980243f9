"""Runs `widepack bench-layers`: measures row after row into one JSON document, which a later run can resume.

Rows of the preset `ci` are small and run in this process.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from widepack.errors import UsageError
from widepack.inference.load import on_device
from widepack.system.atomic_file import admit
from widepack_bench.layers.sweeps import MEMBERS, find

from ..baselines.table import BASELINES
from ..processes.fresh import STEADY
from ..report.environment import environment
from ..report.json_file import write_whole
from ..text import plural
from .block_sweeps import sweeps
from .document import check_artifacts_folder, check_environment, document_of
from .row import Effort, RowOptions
from .rows import Clock, Progress, Task, rows
from .table import settled, summary
from .tuned_many import tune_at_once

TUNE_S = 25.0  # An estimate: seconds to build and tune the artifact of a row.
MOST_MEMBERS = 4096  # Each member is a module, and its answers are computed in float64.


def run_layers(
    names: str,
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
    report: Callable[[str], object] = lambda line: None,
) -> dict[str, Any]:
    """Measures layers by name, and returns the document. After an interruption, its `interrupted` is true.

    names: as `sweeps.find` takes them. members: numbers of members; empty for the preset's. out: the file of
    the document, written after every row. resume: a document to go on with; it is also the output without
    `out`. Rows of it with a settled verdict are not run again. tune: `auto` is a tuned artifact. artifacts:
    keeps the tuned artifacts; None for a temporary folder. jobs: layers tuned at the same time, before
    anything is timed. isolate: run each layer in its own process; the default is true for all presets except
    `ci`. threads: 1 by default. report: called with a line about the size of the run. The others are as in
    `RowOptions`.

    Raises: UsageError.
    """
    tasks = _tasks(names, members or MEMBERS[preset], baselines, device)
    options = RowOptions(
        list(baselines), pattern, device, threads or 1, pin, budget_s, compiled, _folder(artifacts, tune)
    )
    isolate = preset != "ci" if isolate is None else isolate
    document = _prepared(resume, preset, tune, options, isolate)
    out = out or resume
    if out is not None:
        _check_output(out, document)
    if artifacts is not None:
        check_artifacts_folder(artifacts)
    waiting = [t for t in tasks if not settled(document["rows"].get(t.key))]
    clock = Clock(waiting, Effort.of(preset).row_s, TUNE_S / jobs if tune else 0.0, progress)
    report(
        f"{plural(len(waiting), 'row')}"
        f"{f' of {len(tasks)} (the document has the others)' if len(waiting) < len(tasks) else ''}, "
        f"about {clock.left()}"
    )
    run = _Run(waiting, preset, options, isolate, tune, jobs, clock, progress)
    run.into(document, out)
    return document


def _tasks(names: str, counts: Sequence[int], baselines: Sequence[str], device: str) -> list[Task]:
    """Returns the rows of the request. Raises: UsageError for what cannot be measured."""
    if max(counts) > MOST_MEMBERS:
        raise UsageError(f"{max(counts)} members are more than the limit of {MOST_MEMBERS}")
    if unknown := [b for b in baselines if b not in BASELINES]:
        raise UsageError(f"unknown baseline {', '.join(map(repr, unknown))}; known: {', '.join(BASELINES)}")
    on_device(device)
    return [Task(s, n) for s in find(names, sweeps()) for n in dict.fromkeys(counts)]


def _folder(artifacts: Path | None, tune: bool) -> str:
    """Returns `RowOptions.artifacts`: empty where nothing is tuned, or where the folder is temporary."""
    return str(artifacts.absolute()) if tune and artifacts is not None else ""


def _prepared(
    resume: Path | None, preset: str, tune: bool, options: RowOptions, isolate: bool
) -> dict[str, Any]:
    """Returns the document to resume, or a new one, with the environment of this run. Raises: UsageError."""
    document = document_of(resume, preset, options.pattern, tune)
    now = {**environment(options.device, options.threads or 1), "memory": STEADY if isolate else {}}
    if document["rows"]:
        check_environment(resume, document["environment"], now)
    return document | {"environment": now, "interrupted": False}


def _check_output(out: Path, document: dict[str, Any]) -> None:
    """Writes the document before time is spent on results that cannot be saved. Raises: UsageError."""
    admit(out, force=True)
    try:
        write_whole(out, document)
    except OSError as error:
        raise UsageError(f"{out} cannot be written ({error.strerror}); give another path") from error


@dataclass(frozen=True, slots=True)
class _Run:
    """The rows that a run measures, and how."""

    tasks: Sequence[Task]
    preset: str
    options: RowOptions
    isolate: bool
    tune: bool
    jobs: int
    clock: Clock
    progress: Progress | None

    def into(self, document: dict[str, Any], out: Path | None) -> None:
        """Measures the rows into the document, and writes it after each row."""
        try:
            with ExitStack() as stack:
                options = self.options
                if self.tune and not options.artifacts:
                    temporary = tempfile.TemporaryDirectory(prefix="widepack-tuned-")
                    options = replace(options, artifacts=stack.enter_context(temporary))
                fields = asdict(options)
                if self.tune and self.jobs > 1:
                    tune_at_once(self.tasks, self.preset, fields, self.jobs, self.progress)
                    self.clock.tuned()
                for task, row in rows(self.tasks, self.preset, fields, self.isolate, self.clock):
                    document["rows"][task.key] = row
                    _save(document, out)
                    self.clock.done()
        except KeyboardInterrupt:
            document["interrupted"] = True
        _save(document, out)


def _save(document: dict[str, Any], out: Path | None) -> None:
    document["summary"] = summary(document["rows"])
    if out is not None:
        write_whole(out, document)
