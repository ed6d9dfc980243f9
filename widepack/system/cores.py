"""Finds the cores that this process may use, and whether other processes use them."""

from __future__ import annotations

import hashlib
import math
import os
import statistics
import time
from pathlib import Path

from .control_groups import OWN, ROOT, groups
from .threads import spread

SHARE_S = 3e-2
"""The seconds of a measurement of free cores."""
FREE = 0.9
"""The least part of the time in which free cores run this process."""
SAMPLES = 5
"""The measurements whose median counts: what the system does beside us after a build ends soon."""


def usable_cores() -> int:
    """Returns the cores that this process may use: those of its affinity, and at most its cgroup's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(cores, quota())))


def quota(root: Path = ROOT, own: Path = OWN) -> float:
    """Returns the cores that the control groups of this process may use on average; infinity without a quota.

    root, own: as `control_groups.groups` takes them.
    """
    least = math.inf
    for folder, version in groups("cpu", root, own):
        try:
            if version == 2:
                most, period = (folder / "cpu.max").read_text().split()
            else:
                most, period = ((folder / f"cpu.cfs_{n}_us").read_text().strip() for n in ("quota", "period"))
            if most not in ("max", "-1"):
                least = min(least, float(most) / float(period))
        except (OSError, ValueError, ZeroDivisionError):
            continue
    return least


def core_share(threads: int) -> float:
    """Returns the part of the time in which the processor runs threads of this process that all have work.

    It is 1 if as many cores are idle, and less if other processes use them. Takes about `SHARE_S`.
    """
    shares, data = [1.0] * threads, bytes(1 << 20)

    def work(i: int) -> None:
        wall, cpu = time.perf_counter(), time.thread_time()
        while time.thread_time() - cpu < SHARE_S:
            hashlib.sha256(data)  # releases the interpreter's lock
        shares[i] = (time.thread_time() - cpu) / (time.perf_counter() - wall)

    spread(work, threads, threads)
    return min(shares)


def free_threads(threads: int) -> int:
    """Returns how many threads inside ops are fastest now, of at most `threads`.

    It is one if other processes use the cores: the threads of an op wait for each other at its end, and so
    for one that does not run.
    """
    threads = min(threads, usable_cores())
    if threads == 1:
        return 1
    share = statistics.median(core_share(threads) for _ in range(SAMPLES))
    return threads if share >= FREE else 1
