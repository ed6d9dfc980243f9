"""Predicts what rows of several members cost, from measured times of the pattern `each`.

The race of a build and `tune` measure them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from ..planning.plan import Plan

GROUP_MS = 0.02
"""What a group costs beside the call of its member: its rows are taken out, and its answers put in."""
LOOP = "loop"
"""The name of the loop over all members among the measured plans."""


class RowPrices:
    """Milliseconds of the pattern `each` by the number of rows of each member.

    Args:
        plans: The plans of the pattern, one for each batch class.
        members: N, which every measured call has run.

    Attributes:
        known: Whether the plans were measured, with the loop beside them.
    """

    def __init__(self, plans: Sequence[Plan], members: int) -> None:
        measured = sorted((p for p in plans if p.at and LOOP in p.times_ms), key=lambda p: p.at)
        self.known = bool(measured)
        self._each = [(p.at, min(p.times_ms.values())) for p in measured]
        self._alone = [(p.at, p.times_ms[LOOP] / members) for p in measured]

    def padded(self, rows: int) -> float:
        """Returns the milliseconds of a call in which every member has a number of rows."""
        return _between(self._each, rows)

    def groups(self, counts: Mapping[int, int]) -> float:
        """Returns the milliseconds of a call that runs one member after the other.

        counts: the number of rows of each member that has rows.
        """
        return sum(_between(self._alone, rows) + GROUP_MS for rows in counts.values())


def _between(times: Sequence[tuple[int, float]], rows: int) -> float:
    """Returns a time between the measured ones. Fewer rows than measured cost as much as the fewest; more
    cost in proportion.
    """
    place = bisect_left(times, (rows, 0.0))
    if place == 0:
        return times[0][1]
    before, after = times[place - 1], times[place] if place < len(times) else None
    if after is None:
        return before[1] * rows / before[0]
    share = (rows - before[0]) / (after[0] - before[0])
    return before[1] + share * (after[1] - before[1])
