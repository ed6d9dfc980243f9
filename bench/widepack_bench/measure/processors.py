"""Sets the threads and processors of a measurement, and restores them after it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


@contextmanager
def quiet(threads: int | None = None, pin: bool = False) -> Iterator[int]:
    """Runs the body with `threads` threads inside an op, and restores the settings after it.

    pin: also use as many fixed processors, where the system allows it. Yields the number of threads.
    """
    import torch

    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    now = torch.get_num_threads()
    affinity = _pin(now) if pin else {}
    try:
        yield now
    finally:
        torch.set_num_threads(before)
        for task, cpus in affinity.items():
            _set_affinity(task, cpus)


def _pin(count: int) -> dict[int, Any]:
    """Binds every thread of this process to the last `count` allowed processors.

    Returns the earlier processors of each thread.
    """
    if not hasattr(os, "sched_setaffinity"):
        return {}
    allowed = sorted(os.sched_getaffinity(0))
    chosen = set(allowed[-count:])  # Interrupts prefer the first processors.
    before: dict[int, Any] = {}
    for task in (
        [int(name) for name in os.listdir("/proc/self/task")] if os.path.isdir("/proc/self/task") else [0]
    ):
        try:
            before[task] = os.sched_getaffinity(task)
        except OSError:  # The thread has ended.
            continue
        _set_affinity(task, chosen)
    return before


def _set_affinity(task: int, cpus: Any) -> None:
    with suppress(OSError):  # The thread has ended.
        os.sched_setaffinity(task, cpus)
