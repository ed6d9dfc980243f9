"""Runs batches: on the thread of the event loop where they are short, else on a thread.

A short batch on the thread of the loop saves two changes of the thread. Meanwhile other requests arrive in
the kernel's buffers, and share the next batch.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection, Hashable

import torch

from widepack.inference.model import WideModel
from widepack.inference.routing.row_groups import padding_rows

from ..catalog.call import Call
from ..errors import Busy, DeadlinePassed
from .execution import run_batch
from .fair_queue import FairQueue
from .job import Job, Outputs, Part
from .options import BatchOptions, Observer
from .results import Result, set_result, translated
from .timing import Timings

log = logging.getLogger("widepack.serve")
_LONG_S = 0.25
"""Seconds after which a call waits for long."""


class Batcher:
    """Joins calls into batches, and runs them one after the other.

    Args:
        options: How batches are made.
        observer: Is told of batches; None for nobody.
    """

    def __init__(self, options: BatchOptions, observer: Observer | None = None) -> None:
        self._options, self._observer = options, observer
        self._queue = FairQueue(options.max_batch, options.max_queue, options.max_queue_bytes)
        self._timings = Timings()
        self._lock = threading.Condition()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._flush_planned = False
        self._delayed: asyncio.TimerHandle | None = None
        self._rows_before = 0
        self._busy = False
        self._handed: list[Part] = []
        self._running: list[Part] = []
        self._accepting = True
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._results: list[Result] = []
        self.progressed_at = time.monotonic()
        """When a batch last started or ended, or nothing waited, by `time.monotonic`."""

    # ---------------------------------------------------------------- calls

    async def outputs(
        self,
        call: Call,
        timeout: float | None = None,
        delayed: Callable[[Job], None] | None = None,
        client: Hashable = "",
    ) -> Outputs:
        """Runs a call in a batch with others.

        Args:
            call: A checked call.
            timeout: Seconds after which no rows of it start.
            delayed: Is called with the job if it waits for long. The caller may cancel it.
            client: Who sent it. Clients take turns, and share the limits of the queue.

        Returns:
            The outputs, in the order of `call.wanted`.

        Raises:
            Busy: The queue is full, or the batcher drains.
            DeadlinePassed: It waited longer than the timeout.
            RequestError: The model refuses the call.
        """
        loop = self._loop
        if loop is None:
            loop = self._attach()
        future: asyncio.Future[Outputs] = loop.create_future()

        def done(outputs: Outputs | None, error: Exception | None) -> None:
            if threading.get_ident() == self._loop_thread:
                set_result(future, outputs, error)
            else:
                self._results.append((future, outputs, error))

        deadline = None if timeout is None else time.monotonic() + timeout
        job = Job(call, deadline, done, delayed, client, self._options.max_answer)
        with self._lock:
            self._put(job)
            if self._delayed is not None and self._queue.rows >= self._options.max_batch:
                self._delayed.cancel()  # the batch is full
                self._delayed, self._flush_planned = None, False
            if not self._busy and not self._flush_planned:
                self._flush_planned = True
                loop.call_soon(self._flush)
        try:
            return await future
        finally:
            job.cancelled = True

    def _attach(self) -> asyncio.AbstractEventLoop:
        """Uses the running event loop, and its thread, from now on."""
        self._loop, self._loop_thread = asyncio.get_running_loop(), threading.get_ident()
        if self._options.threads is not None:
            torch.set_num_threads(self._options.threads)  # a number of the calling thread
        return self._loop

    def _put(self, job: Job) -> None:
        """Adds a job to the queue. Raises: Busy."""
        if not self._accepting:
            self._reject("draining")
            raise Busy("the server is shutting down; send the request to another one")
        queue = self._queue
        if not queue.rows:  # a request larger than the limit of the queue runs if nothing else waits
            if not self._busy:
                self.progressed_at = time.monotonic()
        elif not queue.counted.admits(job.client, queue.weight(job)):
            self._reject("queue_full")
            raise Busy(
                f"{queue.counted.total} rows wait, and the limit of the queue is {queue.counted.most}; "
                "try again"
            )
        elif not queue.bytes.admits(job.client, job.bytes):
            self._reject("queue_full")
            raise Busy(f"requests of {queue.bytes.total} bytes wait, which is near the limit; try again")
        self._queue.put(job)

    def _reject(self, reason: str) -> None:
        if self._observer is not None:
            self._observer.rejected(reason)

    def _dropped(self, job: Job) -> bool:
        """Ends a job that must not run any more. Returns: whether it did."""
        if job.finished:
            return True
        if job.cancelled:
            self._reject("disconnected")
            job.fail(DeadlinePassed("the client closed the connection"))
            return True
        if job.deadline is not None and job.deadline < time.monotonic():
            self._reject("deadline")
            job.fail(DeadlinePassed(_late(job)))
            return True
        return False

    def check_waiting(self) -> None:
        """Ends the waiting calls whose deadline has passed, also while a batch runs, and tells those that
        wait for long. It is called on the event loop, a few times a second.
        """
        late = time.monotonic() - _LONG_S
        with self._lock:
            self._queue.discard(self._dropped)
            jobs = [j for j in self._queue if j.queued < late]
        for job in jobs:
            if (delayed := job.delayed) is not None:
                job.delayed = None
                delayed(job)

    # ---------------------------------------------------------------- on the thread of the loop

    def _flush(self) -> None:
        """Runs the next batch here if it is short, else gives it to the thread."""
        delay = self._options.max_delay
        with self._lock:
            self._flush_planned, self._delayed = False, None
            if self._busy:
                return  # the thread goes on by itself
            if self._grows() and self._loop is not None:
                self._flush_planned = True
                self._loop.call_soon(self._flush)
                return
            if delay and self._loop is not None and (wait := self._missing(delay)) > 0:
                self._flush_planned = True
                self._delayed = self._loop.call_later(wait, self._flush)
                return
            parts = self._queue.take(self._dropped)
            if not parts:
                if self._queue.rows and self._loop is not None:  # the first calls were dropped meanwhile
                    self._flush_planned = True
                    self._loop.call_soon(self._flush)
                return
            self._busy = True
            if not self._short(parts):
                self._handed = parts
                self._start_thread()
                self._lock.notify()
                return
        try:
            self._run(parts)
        finally:
            self._end()

    def _grows(self) -> bool:
        """Returns whether calls arrived in the last turn of the event loop, so that the batch takes the next
        ones too. Nothing waits for a timer: the loop reads requests meanwhile.
        """
        rows, before = self._queue.rows, self._rows_before
        grows = before < rows < self._options.max_batch
        self._rows_before = rows if grows else 0
        return grows

    def _missing(self, delay: float) -> float:
        """Returns for how many seconds a batch that is not full still waits for more calls."""
        if not self._queue.rows or self._queue.rows >= self._options.max_batch:
            return 0.0
        return min(job.queued for job in self._queue) + delay - time.monotonic()

    def _short(self, parts: list[Part]) -> bool:
        """Returns whether a batch is short enough for the thread of the loop."""
        group = parts[0].job.call.group
        model = parts[0].job.call.model
        if group is None or not self._options.inline or model.artifact.model.device.type != "cpu":
            return False
        predicted = self._timings.predicted(group, sum(p.rows for p in parts))
        return predicted is not None and predicted <= self._options.inline

    def _end(self) -> None:
        """Ends a batch on the thread of the loop, and plans the next one after other events."""
        with self._lock:
            self._busy, self._running = False, []
            if self._queue.rows and not self._flush_planned and self._loop is not None:
                self._flush_planned = True
                self._loop.call_soon(self._flush)
            self._lock.notify_all()

    # ---------------------------------------------------------------- on the thread

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="widepack-batches", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        """Runs the batches that the loop gives away, and those that wait after them."""
        if self._options.threads is not None:
            torch.set_num_threads(self._options.threads)
        while True:
            with self._lock:
                while not self._handed and not self._stopped:
                    self._lock.wait()
                if self._stopped and not self._handed:
                    return
                parts = self._running = self._handed
                self._handed = []
            while parts:
                self._run(parts)
                with self._lock:
                    parts = [] if self._options.max_delay else self._queue.take(self._dropped)
                    self._running = parts
                    short = bool(parts) and self._short(parts)
                    results, self._results = self._results, []
                    if not parts:
                        self._busy = False
                        self._lock.notify_all()
                self._deliver(results, parts if short else None)
                if short:
                    break
            parts = []  # no artifact is kept by its last batch

    def _deliver(
        self,
        results: list[Result],
        parts: list[Part] | None,
    ) -> None:
        """Gives outputs to the loop, and a short batch that it runs itself."""
        if self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(self._received, results, parts)
        except RuntimeError:  # the loop is closed: nobody waits
            with self._lock:
                self._busy = False
                self._lock.notify_all()

    def _received(
        self,
        results: list[Result],
        parts: list[Part] | None,
    ) -> None:
        """Sets outputs on the thread of the loop, and runs a short batch."""
        for result in results:
            set_result(*result)
        if parts is None:
            with self._lock:
                if not self._busy and self._queue.rows and not self._flush_planned and self._loop is not None:
                    self._flush_planned = True
                    self._loop.call_soon(self._flush)
            return
        try:
            self._run(parts)
        finally:
            self._end()

    # ---------------------------------------------------------------- both

    def _run(self, parts: list[Part]) -> None:
        """Runs a batch. Calls that the model refuses fail alone."""
        start = self.progressed_at = time.monotonic()
        work, padding = time.thread_time(), padding_rows()
        for part in parts:
            part.job.started = part.job.started or start
        self._running = parts
        self._run_or_halve(parts)
        self._restart(parts)
        self.progressed_at = time.monotonic()
        call = parts[0].job.call
        if call.group is not None:
            # without the time for which this thread waits for the interpreter lock, if it does all the work
            one = call.model.layout.on_one_thread
            seconds = time.thread_time() - work if one else self.progressed_at - start
            self._timings.add(call.group, sum(p.rows for p in parts), seconds)
        if self._observer is not None:
            try:
                self._observer.ran(parts, self.progressed_at - start, padding_rows() - padding)
            except Exception:  # the thread of the batches must go on
                log.exception("a batch was not counted")

    def _run_or_halve(self, parts: list[Part]) -> None:
        try:
            run_batch(parts)
        except Exception as e:  # noqa: BLE001  any error must reach the client that waits
            parts = [p for p in parts if not p.job.finished]
            if len(parts) == 1:
                parts[0].job.fail(translated(e))
            elif parts:
                self._run_or_halve(parts[: len(parts) // 2])
                self._run_or_halve(parts[len(parts) // 2 :])

    def _restart(self, parts: list[Part]) -> None:
        """Makes the divided calls wait again whose rows were answered by several versions of a member."""
        jobs = {id(p.job): p.job for p in parts if p.job.again}
        if jobs:
            with self._lock:
                for job in jobs.values():
                    self._queue.restart(job)

    # ---------------------------------------------------------------- life

    @property
    def waiting(self) -> int:
        """How many rows wait."""
        return self._queue.rows

    @property
    def idle(self) -> bool:
        """Whether nothing waits or runs."""
        return not self._busy and not self._queue.rows

    @property
    def seconds_without_progress(self) -> float:
        """Seconds since a batch last started or ended, while something waits or runs; else 0."""
        return 0.0 if self.idle else time.monotonic() - self.progressed_at

    def uses(self, models: Collection[WideModel]) -> bool:
        """Returns whether a call of one of some models waits or runs."""
        with self._lock:
            jobs = [*self._queue, *(p.job for p in (*self._running, *self._handed))]
            return any(j.call.model.artifact.model in models for j in jobs)

    def drain(self) -> None:
        """Refuses new calls. Those that wait still run."""
        with self._lock:
            self._accepting = False

    def close(self, timeout: float = 5.0) -> None:
        """Refuses new calls, and ends the thread after its batch.

        timeout: seconds to wait for it.
        """
        with self._lock:
            self._accepting = False
            self._stopped = True
            self._lock.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(timeout)


def _late(job: Job) -> str:
    """Returns what happened to a job whose deadline has passed."""
    text = "the request waited longer than its timeout, and did not run"
    if job.taken or job.restarts:
        text = f"the request did not end within its timeout: {job.taken} of its {job.call.rows} rows ran"
    if job.restarts:
        text += f"; it started again {job.restarts} times, since members were replaced meanwhile"
    return text
