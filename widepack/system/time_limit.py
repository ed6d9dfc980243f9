"""Limits the time of long work, such as a measurement, and of its parts."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

SLOWED = 3.0
"""How many times as long as its processor time a work may take where other processes use the cores."""


@dataclass(frozen=True)
class TimeLimit:
    """A time at which work must end, by the wall clock or by the processor time of this thread, whichever is
    first.

    end: by `time.perf_counter`; infinite without a limit. end_working: by `time.thread_time`.

    Example:
        >>> limit = TimeLimit.of(60.0)
        >>> search = limit.part(1 / 4)  # a quarter of the time that is left now
    """

    end: float = math.inf
    end_working: float = math.inf

    @classmethod
    def of(cls, seconds: float | None) -> TimeLimit:
        """Returns the limit that ends `seconds` from now; None means no limit."""
        return cls() if seconds is None else cls(time.perf_counter() + seconds)

    @classmethod
    def working(cls, seconds: float) -> TimeLimit:
        """Returns the limit of so many seconds of this thread's processor time, and at most `SLOWED` times as
        many by the wall clock.
        """
        return cls(time.perf_counter() + SLOWED * seconds, time.thread_time() + seconds)

    @property
    def left(self) -> float:
        """The seconds that are left, at least 0; infinite without a limit."""
        return max(0.0, min(self.end - time.perf_counter(), self.end_working - time.thread_time()))

    @property
    def over(self) -> bool:
        """Whether no time is left."""
        return self.left <= 0

    def part(self, share: float) -> TimeLimit:
        """Returns the limit that ends when this share of the time that is left now is over."""
        wall, working = time.perf_counter(), time.thread_time()
        return TimeLimit(_between(wall, self.end, share), _between(working, self.end_working, share))

    def later(self, seconds: float, most: TimeLimit) -> TimeLimit:
        """Returns the limit that ends some seconds later, but not after `most`."""
        return TimeLimit(min(self.end + seconds, most.end), min(self.end_working + seconds, most.end_working))


def _between(now: float, end: float, share: float) -> float:
    return end if math.isinf(end) else now + share * max(0.0, end - now)


NO_LIMIT = TimeLimit()
