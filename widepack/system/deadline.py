"""How long a stranger's program may keep a thread busy while it is read."""

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
    """Programs are a stranger's: sizes that grow into endless expressions are refused, and so is all that takes longer than this of the thread's own time."""
    token = _UNTIL.set(time.thread_time() + seconds)
    try:
        yield
    finally:
        _UNTIL.reset(token)


class Lowering:
    """The lowering of one load, or of one later call: all of it has one deadline, 60 s and half a second for each node of a member program, however many entries name it.

    limit: how many times that; None for any time. made: what was lowered, for entries that ask for the same.
    """

    def __init__(self, limit: float | None) -> None:
        self.limit, self.spent = limit, 0.0
        self.nodes: dict[str, int] = {}
        self.made: dict[Any, Any] = {}

    @contextlib.contextmanager
    def within(self, files: Sequence[str], nodes: Sequence[int]) -> Iterator[None]:
        """files: the member programs that are lowered. nodes: how many each has."""
        self.nodes.update(zip(files, nodes))
        seconds = math.inf if self.limit is None else (60 + 0.5 * sum(self.nodes.values())) * max(1.0, self.limit)
        start = time.thread_time()
        try:
            with within(seconds - self.spent):
                yield
        finally:
            self.spent += time.thread_time() - start


def limited() -> bool:
    """Whether this is inside `within`."""
    return _UNTIL.get() < math.inf


def over() -> bool:
    """Whether the time of `within` is over."""
    return time.thread_time() > _UNTIL.get()
