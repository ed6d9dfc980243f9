"""Settings of a process that make calls faster. They are tried in processes of their own."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from widepack.kernel_times.calibration import seconds
from widepack.kernel_times.program import work_at
from widepack.system.timing import without_gc

from ..errors import BenchError
from ..measure.inputs import make
from ..measure.loading import entry_of, load_on
from ..measure.processors import quiet
from ..processes.fresh import STEADY, in_fresh_process
from .move import Move
from .subject import AdvisedArtifact, Workload

ALWAYS_RETURNED = 32 << 20
"""Bytes from which glibc requests the memory of each result from the system (DEFAULT_MMAP_THRESHOLD_MAX)."""
CHILD_S = 0.4
"""Seconds of calls in a process."""


def allocator_moves(subject: AdvisedArtifact) -> Iterator[Move]:
    """Yields the settings with which glibc keeps freed memory."""
    how = " ".join(f"{k}={v}" for k, v in STEADY.items()) + " in the environment of the process"
    yield Move(name="memory is kept", how=how, predict=_predicted, environment=STEADY)


def _predicted(subject: AdvisedArtifact) -> float | None:
    now = subject.seconds(subject.entry)
    if now is None:
        return None
    large = work_at(subject.program, subject.sizes).large_results(ALWAYS_RETURNED)
    return max(now / 2, now - large * _fault_s())


def _fault_s() -> float:
    """Measures the seconds that a byte of new memory takes more than a byte of kept memory."""
    count = ALWAYS_RETURNED // 2
    kept = torch.empty(count)
    fresh = seconds(lambda: torch.empty(count).fill_(1.0))
    return max(0.0, fresh - seconds(partial(kept.fill_, 1.0))) / (4 * count)


def seconds_apart(work: Workload, environment: dict[str, str], limit_s: float) -> float:
    """Measures a call in a process of its own.

    Args:
        work: What is called.
        environment: Variables of the process, beside those of this one.
        limit_s: Seconds after which the process is ended.

    Raises:
        BenchError: The process fails.
    """
    arguments = {
        "path": str(work.path),
        "entry": work.entry,
        "pattern": work.pattern,
        "batch": work.batch,
        "threads": work.threads,
    }
    found = in_fresh_process(
        f"{__name__}:median_call",
        arguments,
        threads=work.threads,
        limit_s=limit_s,
        environment=environment,
    )
    if "error" in found:
        raise BenchError(str(found["error"]))
    return float(found["seconds"])


def median_call(path: str, entry: str, pattern: str, batch: int, threads: int) -> dict[str, float]:
    """Times calls in the process that `seconds_apart` starts."""
    work = Workload(path=Path(path), entry=entry, pattern=pattern, batch=batch, threads=threads)
    with quiet(threads), torch.inference_mode():
        loaded = entry_of(load_on(work.path, "cpu", "auto"), work.entry)
        args, kwargs, _ = make(loaded.entry, batch, members=len(loaded.members) if work.each else 0)
        call = partial(loaded.each if work.each else loaded, *args, **kwargs)
        once = seconds(call)
        with without_gc():
            return {"seconds": statistics.median(seconds(call) for _ in range(_rounds(once)))}


def _rounds(once: float) -> int:
    return max(3, min(25, round(CHILD_S / max(once, 1e-6) / 5)))
