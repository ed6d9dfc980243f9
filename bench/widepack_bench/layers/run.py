"""`bench --primitive`: row after row into one JSON document that a later run goes on with. The small rows of the preset `ci` run in this process."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from widepack.errors import UsageError
from widepack.inference.load import on_device
from widepack.system.atomic_file import admit
from widepack_bench.layers.sweeps import MEMBERS, find

from ..baselines.table import BASELINES
from .block_sweeps import sweeps
from ..processes.fresh import STEADY
from .row import Effort
from .rows import Clock, Progress, Task, rows
from .table import settled, summary
from ..report.document import environment
from ..suite.run import write_whole
from ..text import plural
from .tuned_many import tune_at_once

FORMAT = "widepack.primitives/1"
TUNE_S = 25.0  # of building and tuning a row, roughly
MOST = 4096  # members: each is a module of its own, whose answers are held to float64


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
    rows that it has, that were not noisy and whose interval was narrow are not run again. tune: `auto` is an artifact that is tuned here. artifacts: where those are kept, a temporary folder without it. jobs: primitives that are tuned at once, each in a process of its own, all before
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
    isolate = preset != "ci" if isolate is None else isolate
    where = {**environment(device, threads), "memory": STEADY if isolate else {}}
    if document["rows"]:
        _same_place(resume, document["environment"], where)
    document |= {"environment": where, "interrupted": False}
    out = out or resume
    if out is not None:  # before anything is measured that could not be kept
        admit(out, force=True)
        try:
            write_whole(out, document)
        except OSError as error:
            raise UsageError(f"{out} cannot be written ({error.strerror}); give another path") from error
    if artifacts is not None:
        try:
            artifacts.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=artifacts).close()
        except OSError as error:
            raise UsageError(f"{artifacts} cannot be written into ({error.strerror}); give another folder to --artifacts") from error
    options = {
        "baselines": list(baselines),
        "pattern": pattern,
        "device": device,
        "threads": threads,
        "pin": pin,
        "budget_s": budget_s,
        "compiled": compiled,
        "artifacts": str(artifacts.absolute()) if tune and artifacts is not None else "",
    }
    waiting = [t for t in tasks if not settled(document["rows"].get(t.key))]
    clock = Clock(waiting, Effort.of(preset).row_s, TUNE_S / jobs if tune else 0.0, progress)
    said(f"{plural(len(waiting), 'row')}{f' of {len(tasks)}, the others are there' if len(waiting) < len(tasks) else ''}, about {clock.left()}")
    try:
        with ExitStack() as stack:
            if tune and artifacts is None:
                options["artifacts"] = stack.enter_context(tempfile.TemporaryDirectory(prefix="widepack-tuned-"))
            if tune and jobs > 1:
                tune_at_once(waiting, preset, options, jobs, progress)
                clock.tuned()
            for task, row in rows(waiting, preset, options, isolate, clock):
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
    before = {"memory": {}, **before}
    other = [f"{key} {before.get(key)} and now {now[key]}" for key in ("device", "threads", "memory") if before.get(key) != now[key]]
    if other:
        raise UsageError(f"{path} holds rows measured elsewhere: {', '.join(other)}; give each its own file")
