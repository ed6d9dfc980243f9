"""Remembers how long batches take, to predict the next one."""

from __future__ import annotations

from collections.abc import Hashable

_WEIGHT = 0.2
"""How much a new time counts."""
_SEEN = 4096


class Timings:
    """The seconds of a batch by its group and its number of rows, in classes of powers of two."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[Hashable, int], float] = {}

    def add(self, group: Hashable, rows: int, seconds: float) -> None:
        """Counts a batch that ran."""
        key = (group, rows.bit_length())
        before = self._seconds.get(key)
        if before is None and len(self._seconds) >= _SEEN:
            self._seconds.clear()
        self._seconds[key] = seconds if before is None else before + _WEIGHT * (seconds - before)

    def predicted(self, group: Hashable, rows: int) -> float | None:
        """Returns the seconds of a batch; None if no batch of this class has run."""
        return self._seconds.get((group, rows.bit_length()))
