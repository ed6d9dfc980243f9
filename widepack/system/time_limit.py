"""Limits the wall time of long work, such as a measurement, and of its parts."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class TimeLimit:
    """A time at which work must end. end: by `time.perf_counter`; infinite without a limit.

    Example:
        >>> limit = TimeLimit.of(60.0)
        >>> search = limit.part(1 / 4)  # a quarter of the time that is left now
    """

    end: float = math.inf

    @classmethod
    def of(cls, seconds: float | None) -> TimeLimit:
        """Returns the limit that ends `seconds` from now; None means no limit."""
        return cls() if seconds is None else cls(time.perf_counter() + seconds)

    @property
    def left(self) -> float:
        """The seconds that are left, at least 0; infinite without a limit."""
        return max(0.0, self.end - time.perf_counter())

    @property
    def over(self) -> bool:
        """Whether no time is left."""
        return self.left <= 0

    def part(self, share: float) -> TimeLimit:
        """Returns the limit that ends when this share of the time that is left now is over."""
        return TimeLimit(self.end if math.isinf(self.end) else time.perf_counter() + share * self.left)

    def later(self, seconds: float, most: TimeLimit) -> TimeLimit:
        """Returns the limit that ends some seconds later, but not after `most`."""
        return TimeLimit(min(self.end + seconds, most.end))


NO_LIMIT = TimeLimit()
