"""Members over threads: the body of a loop for several members at once, each on one thread of its own.

An op of one member is often too small for all cores; N members side by side are not. Which is faster hangs on the shapes, and `widepack tune` measures it. The
threads are made once for the process and wait for work; in a child after `fork` they are made anew.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

_lock = threading.Lock()
_pools: dict[int, ThreadPoolExecutor] = {}


def spread(work: Callable[[int], None], count: int, threads: int) -> None:
    """`work(i)` for every i below count, on up to `threads` threads at once. Raises: what the first `work` that failed did, once all have ended."""
    left = deque(range(count))
    inference = torch.is_inference_mode_enabled()

    def run() -> None:
        with torch.inference_mode(inference):
            while left:
                try:
                    i = left.popleft()
                except IndexError:  # another thread was faster
                    return
                try:
                    work(i)
                except BaseException:
                    left.clear()
                    raise

    workers = _pool(threads)
    running: list[Future[None]] = [workers.submit(run) for _ in range(min(threads, count))]
    errors = [error for f in running if (error := f.exception()) is not None]
    if errors:
        raise errors[0]


def _pool(threads: int) -> ThreadPoolExecutor:
    with _lock:
        if threads not in _pools:
            before = torch.get_num_threads()
            made = ThreadPoolExecutor(threads, "widepack", initializer=_alone)
            all_there = threading.Barrier(threads)
            list(made.map(lambda _: all_there.wait(), range(threads)))
            torch.set_num_threads(before)  # what a worker sets is also the number of threads that are made later
            _pools[threads] = made
        return _pools[threads]


def _alone() -> None:
    """One thread inside an op. Asking first matters: torch gives a thread the process's number when it first needs one, whatever was set before."""
    torch.get_num_threads()
    torch.set_num_threads(1)


def _forget() -> None:
    """After a fork the threads are the parent's."""
    global _lock
    _lock = threading.Lock()
    _pools.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
