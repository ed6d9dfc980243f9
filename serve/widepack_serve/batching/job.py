"""Defines a waiting call, and a part of its rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch

from ..catalog.call import Call
from ..errors import TooLarge

Outputs = list[torch.Tensor]
"""The outputs of a call, in the order of `Call.wanted`."""


class Job:
    """A waiting call.

    A call with many rows runs in several batches; its outputs are joined at the end. All of them are of the
    same version of the members: if a member is replaced between two batches, the call starts again.

    Args:
        call: The call.
        deadline: The time of `time.monotonic` after which no rows of it must start; None for none.
        done: Is called once, on any thread, with (outputs, error): one of the two is None.
        delayed: Is called on the event loop if the job waits for long; None for nothing.
        client: Who sent it.
        max_answer: The most bytes of its outputs.

    Attributes:
        call: The call.
        client, deadline, delayed: As given.
        lane: Calls of equal lanes wait in one line: those of one client and one member.
        bytes: The bytes of its tensors.
        weight: How many rows count for the limit of rows that wait. The queue sets it.
        taken: How many rows a batch has taken.
        queued: The time of `time.monotonic` at which the job was made.
        started: The time at which its first rows started; 0 before.
        cancelled: Whether nobody waits for the outputs any more.
        again: Whether it must start again.
        restarts: How often it started again.
    """

    __slots__ = (
        "_done",
        "_finished",
        "_max_answer",
        "_parts",
        "_version",
        "again",
        "bytes",
        "call",
        "cancelled",
        "client",
        "deadline",
        "delayed",
        "lane",
        "queued",
        "restarts",
        "started",
        "taken",
        "weight",
    )

    def __init__(
        self,
        call: Call,
        deadline: float | None,
        done: Callable[[Outputs | None, Exception | None], None],
        delayed: Callable[[Job], None] | None = None,
        client: Hashable = "",
        max_answer: int | None = None,
    ) -> None:
        numbers = call.numbers
        member = numbers[0] if numbers is not None and len(numbers) else -1
        self.call = call
        self.client = client
        self.deadline = deadline
        self.lane: Hashable = (call.model.artifact.name, member, client)
        self.bytes = sum(t.nbytes for t in call.tensors)
        self.weight = 0
        self.taken = 0
        self.queued = time.monotonic()
        self.started = 0.0
        self.cancelled = False
        self.again = False
        self.restarts = 0
        self.delayed = delayed
        self._done = done
        self._finished = False
        self._max_answer = max_answer
        self._version: int | None = None
        self._parts: dict[int, Outputs] = {}  # by the first of their rows

    @property
    def left(self) -> int:
        """How many rows no batch has taken. A call that runs alone counts as one row until it is taken."""
        return max(self.call.rows, 1) - self.taken

    @property
    def finished(self) -> bool:
        """Whether it has outputs or an error."""
        return self._finished

    def finish(self, outputs: Outputs) -> None:
        """Ends the job with its outputs."""
        if self._finished:
            return
        if not self._fits(sum(t.nbytes for t in outputs)):
            return
        self._finished = True
        self._done(outputs, None)

    def fail(self, error: Exception) -> None:
        """Ends the job with an error. Other parts of it are dropped."""
        if not self._finished:
            self._finished = True
            self._parts.clear()
            self._done(None, error)

    def add_part(self, start: int, outputs: Outputs, dims: list[int], version: int | None) -> None:
        """Keeps the outputs of some rows, and ends the job if no rows are missing.

        Args:
            start: The first of the rows.
            outputs: Their outputs.
            dims: In which dim of each output the rows are.
            version: Of the members that answered; None if one was replaced meanwhile.
        """
        if self._finished or self.again:
            return  # a batch may have several parts of it, and those after a replaced member do not count
        if version is None or (self._parts and version != self._version):
            self._parts.clear()
            self.again = True
            return
        self._version = version
        self._parts[start] = outputs
        have = sum(part[0].shape[dims[0]] for part in self._parts.values())
        one = sum(t.nbytes for t in outputs) / max(outputs[0].shape[dims[0]], 1)
        if have < self.call.rows:
            self._fits(int(one * self.call.rows))
            return
        ordered = [self._parts[first] for first in sorted(self._parts)]
        self._parts = {}
        self.finish([torch.cat(list(leaves), dim) for dim, leaves in zip(dims, zip(*ordered))])

    def _fits(self, size: int) -> bool:
        """Ends the job if its answer is too large. Returns: whether it is not."""
        if self._max_answer is None or size <= self._max_answer:
            return True
        self.fail(
            TooLarge(
                f"the answer has about {size} bytes, and the limit is {self._max_answer} (--max-answer); "
                "send fewer rows in a request, or request figures such as the mean of the members"
            )
        )
        return False


class Part(NamedTuple):
    """Rows `start` to `stop` of a job, in one batch."""

    job: Job
    start: int
    stop: int

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return self.stop - self.start

    @property
    def whole(self) -> bool:
        """Whether it has all rows of its job."""
        return self.rows >= max(self.job.call.rows, 1)
