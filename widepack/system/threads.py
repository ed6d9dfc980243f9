"""Members over threads: the body of a loop for several members at once, each on one thread of its own.

An op of one member is often too small for all cores; N members side by side are not. Which is faster hangs on the shapes, and `widepack tune` measures it. The
threads are made once for the process and wait for work; they are daemons, so that work may come as long as anything runs. In a child after `fork` they are made anew.
Where no thread can be made, or from inside such a thread, the calling thread does the work.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

import torch

START_S = 60.0  # a thread that takes longer to start is not waited for
_lock = threading.Lock()
_queues: dict[int, SimpleQueue[Callable[[], None]]] = {}
_local = threading.local()


class _Job:
    """`work(i)` for every i below count, by several threads. They compute as the thread that made it does: inference mode, autocast."""

    def __init__(self, work: Callable[[int], None], count: int, runners: int) -> None:
        self.work, self.left, self.running = work, deque(range(count)), runners
        self.errors: list[BaseException] = []
        self.done = threading.Condition()
        self.inference = torch.is_inference_mode_enabled()
        self.autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None

    def run(self) -> None:
        try:
            cast = torch.autocast("cpu", dtype=self.autocast) if self.autocast is not None else contextlib.nullcontext()
            with torch.inference_mode(self.inference), cast:
                while self.left:
                    try:
                        i = self.left.popleft()
                    except IndexError:  # another thread was faster
                        break
                    self.work(i)
        except BaseException as error:  # noqa: BLE001  # told by the thread that waits
            self.left.clear()
            self.errors.append(error)
        finally:
            with self.done:
                self.running -= 1
                self.done.notify_all()

    def wait(self) -> None:
        try:
            with self.done:
                self.done.wait_for(lambda: not self.running)
        finally:
            self.left.clear()  # where waiting was interrupted, no more work begins
        if self.errors:
            raise self.errors[0]


def spread(work: Callable[[int], None], count: int, threads: int) -> None:
    """`work(i)` for every i below count, on up to `threads` threads at once. Raises: what the first `work` that failed did, once all have ended."""
    queue = None if getattr(_local, "inside", False) else _threads(threads)
    if queue is None:
        for i in range(count):
            work(i)
        return
    job = _Job(work, count, min(threads, count))
    for _ in range(job.running):
        queue.put(job.run)
    job.wait()


def _threads(count: int) -> SimpleQueue[Callable[[], None]] | None:
    """The queue that so many threads take work from; None where none could be started."""
    with _lock:
        if count in _queues:
            return _queues[count]
        before = torch.get_num_threads()
        queue: SimpleQueue[Callable[[], None]] = SimpleQueue()
        there = threading.Semaphore(0)
        started = 0
        for number in range(count):
            try:
                threading.Thread(target=_serve, args=(queue, there), name=f"widepack-{number}", daemon=True).start()
            except RuntimeError:  # the system gives no more threads: those that there are do the work
                break
            started += 1
        for _ in range(started):
            there.acquire(timeout=START_S)
        torch.set_num_threads(before)  # what a worker sets is also the number of threads that are made later
        if not started:
            return None
        _queues[count] = queue
        return queue


def _serve(queue: SimpleQueue[Callable[[], None]], there: threading.Semaphore) -> None:
    """A worker: one thread inside an op. Asking first matters: torch gives a thread the process's number when it first needs one, whatever was set before."""
    torch.get_num_threads()
    torch.set_num_threads(1)
    _local.inside = True
    there.release()
    while True:
        queue.get()()


def _forget() -> None:
    """After a fork the threads are the parent's."""
    global _lock
    _lock = threading.Lock()
    _queues.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
