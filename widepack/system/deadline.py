"""Limits the CPU time that reading an untrusted program may take."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

_UNTIL: ContextVar[float] = ContextVar("until", default=math.inf)


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Limits the CPU time of this thread in the block.

    Fake values check the limit, and refuse sizes that are endless expressions.
    """
    token = _UNTIL.set(time.thread_time() + seconds)
    try:
        yield
    finally:
        _UNTIL.reset(token)


class Deadline:
    """One deadline for all lowering of a load, or of a later call.

    It is 60 s, and 0.5 s for each node of a member program. A member program counts once, however many
    entries name it. limit: a factor on that time; None for no limit. made: the lowered programs, for entries
    that need the same one.
    """

    def __init__(self, limit: float | None) -> None:
        self.limit, self.spent = limit, 0.0
        self.nodes: dict[str, int] = {}
        self.made: dict[Any, Any] = {}

    @contextlib.contextmanager
    def within(self, files: Sequence[str], nodes: Sequence[int]) -> Iterator[None]:
        """Limits the block to the time that is left.

        files: the member programs that are lowered. nodes: of each.
        """
        self.nodes.update(zip(files, nodes))
        seconds = (
            math.inf if self.limit is None else (60 + 0.5 * sum(self.nodes.values())) * max(1.0, self.limit)
        )
        start = time.thread_time()
        try:
            with within(seconds - self.spent):
                yield
        finally:
            self.spent += time.thread_time() - start


def limited() -> bool:
    """Whether this code runs inside `within`."""
    return _UNTIL.get() < math.inf


def over() -> bool:
    """Whether the time of the enclosing `within` is over."""
    return time.thread_time() > _UNTIL.get()
