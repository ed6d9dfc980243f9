"""Runs the body of a loop for several members at once, each on its own thread.

An op of one member is often too small for all cores; ops of N members at once are not. Which is faster
depends on the shapes, and `widepack tune` measures it. The threads are started once in a process and wait for
work. They are daemons, so work may come until the process ends. After a `fork` the child starts new ones. If
no thread can be started, or from inside one of these threads, the calling thread does the work.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

import torch

START_S = 60.0  # the longest wait for a thread to start
_lock = threading.Lock()
_queues: dict[int, SimpleQueue[Callable[[], None]]] = {}
_local = threading.local()


class _ThreadTask:
    """Runs `work(i)` for each i below a count, on several threads, with the inference mode and autocast of
    the thread that made it.
    """

    def __init__(self, work: Callable[[int], None], count: int, runners: int) -> None:
        self.work, self.left, self.running = work, deque(range(count)), runners
        self.errors: list[BaseException] = []
        self.done = threading.Condition()
        self.inference = torch.is_inference_mode_enabled()
        self.autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None

    def run(self) -> None:
        try:
            cast = (
                torch.autocast("cpu", dtype=self.autocast)
                if self.autocast is not None
                else contextlib.nullcontext()
            )
            with torch.inference_mode(self.inference), cast:
                while self.left:
                    try:
                        i = self.left.popleft()
                    except IndexError:  # another thread was faster
                        break
                    self.work(i)
        except BaseException as error:  # noqa: BLE001  # raised again by the waiting thread
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
            self.left.clear()  # after an interrupt no more work begins
        if self.errors:
            raise self.errors[0]


def spread(work: Callable[[int], None], count: int, threads: int) -> None:
    """Runs `work(i)` for each i below a count, on at most `threads` threads.

    Raises: the first error, after all threads ended.
    """
    queue = None if getattr(_local, "inside", False) else _threads(threads)
    if queue is None:
        for i in range(count):
            work(i)
        return
    job = _ThreadTask(work, count, min(threads, count))
    for _ in range(job.running):
        queue.put(job.run)
    job.wait()


def _threads(count: int) -> SimpleQueue[Callable[[], None]] | None:
    """The queue of this many threads; None if no thread could be started."""
    with _lock:
        if count in _queues:
            return _queues[count]
        before = torch.get_num_threads()
        queue: SimpleQueue[Callable[[], None]] = SimpleQueue()
        ready = threading.Semaphore(0)
        started = 0
        for number in range(count):
            try:
                threading.Thread(
                    target=_serve, args=(queue, ready), name=f"widepack-{number}", daemon=True
                ).start()
            except RuntimeError:  # the system allows no more threads: the started ones do the work
                break
            started += 1
        for _ in range(started):
            ready.acquire(timeout=START_S)
        torch.set_num_threads(before)  # a worker's setting also applies to threads that start later
        if not started:
            return None
        _queues[count] = queue
        return queue


def _serve(queue: SimpleQueue[Callable[[], None]], ready: threading.Semaphore) -> None:
    """Runs a worker, whose ops use one thread.

    The number is read before it is set: torch gives a thread the number of the process when it first needs
    one, whatever was set before.
    """
    torch.get_num_threads()
    torch.set_num_threads(1)
    _local.inside = True
    ready.release()
    while True:
        queue.get()()


def _forget() -> None:
    """Forgets the threads after a fork: they exist only in the parent."""
    global _lock
    _lock = threading.Lock()
    _queues.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
