"""Advises on an artifact: `advise(path)`."""

from __future__ import annotations

import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from widepack.backends import NAMES
from widepack.costs.amounts import main_dtype
from widepack.errors import UsageError
from widepack.spec.dtypes import find_dtype
from widepack.spec.entries import PATTERNS
from widepack.system.progress import Report as Progress
from widepack.system.time_limit import TimeLimit
from widepack.system.timing import race
from widepack_artifacts.reader import Reader

from ..baselines.compiled import compiler_settings
from ..measure.levels import LEVELS, load_levels
from ..measure.loading import entry_of
from ..measure.processors import quiet
from ..report.environment import environment
from ..text import duration, plural
from .call_moves import member_moves, row_moves
from .environment_moves import allocator_moves
from .load_moves import compile_moves, dtype_moves, memory_moves, thread_moves
from .machine_times import times_here
from .move import Move
from .plan_moves import plan_in_use, plan_moves, rebuilt
from .report import Advice, MeasuredMove
from .subject import AdvisedArtifact, Workload
from .trial import tried

MEMBERS = "members in turn"
LADDER_S = 2.0
RUN_S = 3.0
"""Seconds of one run of a move."""


def advise(
    path: str | os.PathLike[str],
    *,
    batch: int = 8,
    pattern: str = "shared",
    entry: str = "",
    threads: int | None = None,
    dtypes: Sequence[str] = (),
    backends: Sequence[str] | None = None,
    model: str | None = None,
    model_args: Mapping[str, Any] | None = None,
    only: str = "",
    out: str | os.PathLike[str] | None = None,
    total_s: float | None = None,
    progress: Progress | None = None,
) -> Advice:
    """Predicts, carries out and measures what would make the calls of an artifact faster on this machine.

    The artifact itself is not changed: moves that write one work on a copy in a temporary folder.

    Args:
        path: The artifact.
        batch: The batch of the calls.
        pattern: `shared` (all members get the same inputs) or `each` (every member has its own).
        entry: The entry. Default: the first one.
        threads: Threads inside an op. Default: torch's number; then other numbers are moves.
        dtypes: Other dtypes to try. Their answers differ by their rounding.
        backends: The backends to try: `aot`, `onnxruntime`, `compile`; `eager` alone means no other. Default:
            all that this machine has. Compilation takes a minute or more.
        model: The factory of a member, `package.module:factory` or `file.py:factory`. With it, weights that
            could be shared or factored are looked for, by a build from the members' weights.
        model_args: Arguments of the factory.
        only: The number or the name of the one move to try. Default: all.
        out: With `only`: write the artifact to which the move leads here, if it is recommended.
        total_s: Seconds after which no further move begins. Default: no limit.
        progress: Called with (stage, done, total).

    Returns:
        The advice: every move, with its predicted and its measured gain.

    Raises:
        UsageError: An argument is wrong, there is no such move, or the move changes no artifact.
        ArtifactError: The folder is not an artifact.
        BenchError: The entry carries state, or no inputs can be made for it.

    Example:
        >>> print(advise("ens.wide", batch=8).table())
    """
    limit = TimeLimit.of(total_s)
    if pattern not in PATTERNS:
        raise UsageError(f"unknown pattern {pattern!r}; known: {', '.join(PATTERNS)}")
    if unknown := [b for b in backends or () if b not in NAMES]:
        raise UsageError(f"unknown backend {', '.join(unknown)}; known: {', '.join(NAMES)}")
    if batch < 1:
        raise UsageError(f"batch {batch}: a call has at least one row")
    for dtype in dtypes:
        find_dtype(dtype)
    cores = len(os.sched_getaffinity(0))
    if threads is not None and not 1 <= threads <= cores:
        raise UsageError(f"threads={threads}: this process may use {cores} processors")
    if total_s is not None and not 0 < total_s < math.inf:
        raise UsageError(f"total_s={total_s}: give a positive number of seconds")
    _check_out(out, only)
    say = progress or (lambda stage, done, total: None)
    dtype = _dtype_of(Reader(path), entry)  # refuses what is no artifact before anything is measured
    with _prepared(threads, Path(path)) as (count, folder):
        say("measuring this machine, about half a minute unless `widepack calibrate` has done it", 0, 1)
        began = time.monotonic()
        times = times_here(count, dtype)
        machine_s = time.monotonic() - began
        say("load", 0, 1)
        work = Workload(path=Path(path), entry=entry, pattern=pattern, batch=batch, threads=count)
        subject = AdvisedArtifact.of(work, times, folder, progress)
        moves = _chosen(
            list(moves_of(subject, threads, dtypes, backends, model, model_args or {})), only, out is not None
        )
        # Another number of threads is predicted by times of its own, and a move runs twice.
        waits_s = sum(2 * RUN_S + machine_s * move.measures_machine for _, move in moves)
        if moves:
            say(f"{plural(len(moves), 'move')}, up to {duration(1e3 * min(waits_s, limit.left))}", 0, 1)
        ladder = {} if only else _ladder(subject)
        found: list[MeasuredMove] = []
        for done, (number, move) in enumerate(moves):
            say(move.name, done, len(moves))
            if limit.over:
                row = MeasuredMove(number=number, name=move.name, how=move.how, predicted=None)
                found.append(replace(row, outcome="out of time", reason="the time limit was reached"))
            else:
                found.append(tried(subject, move, number, RUN_S))
        say("moves", len(moves), len(moves))
        advice = _advice(subject, ladder, found)
        if out is not None and advice.recommended:
            _published(folder / moves[0][1].artifact, Path(out))
        return advice


def _check_out(out: str | os.PathLike[str] | None, only: str) -> None:
    """Raises: UsageError where no artifact can be written."""
    if out is None:
        return
    if not only:
        raise UsageError("an artifact is written for one move: name it with `only`")
    parent = Path(out).absolute().parent
    if Path(out).exists():
        raise UsageError(f"{out} exists; name a new folder")
    if not os.access(parent, os.W_OK):
        raise UsageError(f"{out}: nothing can be written into {parent}")


def _published(path: Path, out: Path) -> None:
    """Copies an artifact. It appears as a whole, or not at all."""
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.absolute().parent) as folder:
        shutil.copytree(path, Path(folder) / out.name)
        (Path(folder) / out.name).rename(out)


def _dtype_of(reader: Reader, entry: str) -> str:
    """Returns the dtype of an entry's weights, for which times are measured."""
    entries = reader.manifest.entries
    name = entry if entry in entries else reader.manifest.entry or next(iter(entries))
    return main_dtype(reader.program(entries[name].member[0]))


@contextmanager
def _prepared(threads: int | None, path: Path) -> Iterator[tuple[int, Path]]:
    """Sets up what the moves need: threads, no gradients, and a folder that can have links to the artifact's
    files.
    """
    parent = path.absolute().parent
    beside = _device(Path(tempfile.gettempdir())) != _device(parent) and os.access(parent, os.W_OK)
    with (
        quiet(threads) as count,
        torch.inference_mode(),
        compiler_settings(),
        tempfile.TemporaryDirectory(prefix=".widepack-advice-", dir=parent if beside else None) as folder,
    ):
        yield count, Path(folder)


def _device(path: Path) -> int:
    return path.stat().st_dev if path.exists() else -1


def moves_of(
    subject: AdvisedArtifact,
    threads: int | None,
    dtypes: Sequence[str],
    backends: Sequence[str] | None,
    model: str | None,
    model_args: Mapping[str, Any],
) -> Iterator[Move]:
    """Yields every move that applies. The arguments are as in `advise`."""
    yield from plan_moves(subject, backends)
    if model is not None:
        yield from rebuilt(subject, model, model_args)
    if threads is None:
        yield from thread_moves(subject, len(os.sched_getaffinity(0)))
    yield from row_moves(subject)
    yield from member_moves(subject)
    yield from memory_moves(subject)
    yield from dtype_moves(subject, dtypes)
    if backends is None or "compile" in backends:
        yield from compile_moves(subject, backends is not None)
    yield from allocator_moves(subject)


def _chosen(moves: Sequence[Move], only: str, writes: bool) -> list[tuple[int, Move]]:
    """Returns the moves to try, with their numbers. Raises: UsageError."""
    numbered = list(enumerate(moves, 1))
    if not only:
        return numbered
    found = [(i, m) for i, m in numbered if only in (str(i), m.name)]
    if not found:
        known = ", ".join(f"{i} ({m.name})" for i, m in numbered) or "none"
        raise UsageError(f"there is no move {only!r} for this artifact; the moves are {known}")
    ((number, move),) = found
    if writes and not move.artifact:
        raise UsageError(f"move {number} ({move.name}) writes no artifact. Do it by: {move.how}")
    return [(number, move)]


def _ladder(subject: AdvisedArtifact) -> dict[str, float]:
    """Times the levels of `widepack bench --levels`, but for the compiled one. Returns milliseconds."""
    levels, _ = load_levels(subject.work.path, "cpu", [name for name in LEVELS if name != "compiled"])
    calls = {"now": subject.call(subject.entry)}
    calls[MEMBERS] = lambda: subject.members(*subject.args, **subject.kwargs)
    calls |= {name: subject.call(entry_of(ens, subject.work.entry)) for name, ens in levels.items()}
    times = race(calls, LADDER_S)
    return {name: 1e3 * statistics.median(found) for name, found in times.items()}


def _advice(subject: AdvisedArtifact, ladder: Mapping[str, float], moves: Sequence[MeasuredMove]) -> Advice:
    work = subject.work
    predicted = {MEMBERS: subject.loop_seconds(), "now": subject.seconds(subject.entry)}
    now = ladder.get("now")
    if now is None:
        now = 1e3 * statistics.median(race({"now": subject.call(subject.entry)}, 0.5)["now"])
    return Advice(
        path=str(work.path),
        entry=subject.entry.name,
        pattern=work.pattern,
        batch=work.batch,
        members=subject.count,
        threads=work.threads,
        ms=now,
        plan=plan_in_use(subject).strategies(),
        ladder=ladder,
        predicted_ms={name: 1e3 * s for name, s in predicted.items() if s is not None},
        moves=tuple(moves),
        sizes=subject.sizes,
        environment=environment("cpu", work.threads),
    )
