"""How long a stranger's program may keep a thread busy while it is read."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from contextvars import ContextVar

_UNTIL: ContextVar[float] = ContextVar("until", default=math.inf)


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Programs are a stranger's: sizes that grow into endless expressions are refused, and so is all that takes longer than this of the thread's own time."""
    token = _UNTIL.set(time.thread_time() + seconds)
    try:
        yield
    finally:
        _UNTIL.reset(token)


def limited() -> bool:
    """Whether this is inside `within`."""
    return _UNTIL.get() < math.inf


def over() -> bool:
    """Whether the time of `within` is over."""
    return time.thread_time() > _UNTIL.get()
