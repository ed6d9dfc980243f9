"""Chooses what runs the rows of single members: a session of the member, or its own program on `eager`.

A backend may have functions of single members (`backends/onnx_member_sessions.py`). They run where the plan
of the call's kind was measured, and a member takes less time in them than on `eager`.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..backends import MemberFunctions
from ..backends.task import Function
from ..planning.plan import LOOP, Plan, name_on, scaled
from ..spec.entries import PATTERNS
from ..system.autocast import plain_modes
from .entry_programs import EntryPrograms
from .programs.bound_program import BoundProgram

SESSIONS = "onnxruntime"
"""The backend that has functions of single members."""
GROUP_MS = 0.02
"""What a group costs beside the call of its member: its rows are taken out, and its answers put in."""
_CALL_MS = 0.012
"""What a call of such a function takes beside the work."""
_SEEN = 256


class MemberTimes:
    """Measured milliseconds of the rows of one member, by their number.

    Args:
        plans: The measured plans of a pattern, one for each batch class.
        members: N, which every measured call has run.

    Attributes:
        named: Whether a plan runs in sessions.
    """

    def __init__(self, plans: Sequence[Plan], members: int) -> None:
        measured = sorted((p for p in plans if p.at and LOOP in p.times_ms), key=lambda p: p.at)
        name = name_on(LOOP, SESSIONS)
        self._eager = [(p.at, p.times_ms[LOOP] / members) for p in measured]
        self._session = [(p.at, p.times_ms[name] / members) for p in measured if name in p.times_ms]
        self.named = any(p.backend == SESSIONS for p in plans)

    def _least(self, rows: int) -> float:
        """Returns the milliseconds of the faster one."""
        eager = between(self._eager, rows)
        return min(eager, between(self._session, rows) + _CALL_MS) if self._session and self.named else eager

    def groups(self, counts: Iterable[int]) -> float | None:
        """Returns the milliseconds of a call that runs one member after the other; None without measured
        plans.

        counts: the number of rows of each member that has rows.
        """
        return sum(self._least(rows) + GROUP_MS for rows in counts) if self._eager else None

    def session_is_faster(self, rows: int) -> bool:
        """Returns whether a session of the member takes less time than its program on `eager`."""
        if not self._session:
            return self.named
        return between(self._session, rows) + _CALL_MS < between(self._eager, rows)


def between(times: Sequence[tuple[int, float]], rows: int) -> float:
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


class SingleMembers:
    """The members of one entry, each alone.

    Args:
        programs: The entry's programs.
        pattern: The pattern whose measured times count.
    """

    def __init__(self, programs: EntryPrograms, pattern: str) -> None:
        self._programs, self._artifact = programs, programs.artifact
        plans = programs.source.measured_plans(pattern)
        self.times = MemberTimes(plans, len(self._artifact.manifest.members))
        named = self._artifact.options.backend
        self._requested = named == SESSIONS
        self.possible = self._requested or (named == "auto" and self.times.named)
        self._seen: dict[Any, BoundProgram | None] = {}

    def program(self, place: int, sizes: Mapping[str, int]) -> BoundProgram | None:
        """Returns the program whose backend runs a member. None: its own program does.

        Not inside the gate. place: of the member among the loaded ones. sizes: of the call's dims.
        """
        if not self.possible or self._artifact.closed:
            return None
        key = (place, *sizes.items())
        if key not in self._seen:
            if len(self._seen) >= _SEEN:
                self._seen.clear()
            self._seen[key] = self._chosen(place, sizes)
        return self._seen.get(key)

    def _chosen(self, place: int, sizes: Mapping[str, int]) -> BoundProgram | None:
        inputs = self._programs.inputs
        rows = scaled(sizes, inputs.letter, inputs.example) or 1
        if not self._requested and not self.times.session_is_faster(rows):
            return None
        bound = [b for pattern, b in self._programs.bound() if pattern in PATTERNS]
        for one in bound or self._programs.of(PATTERNS[0]):
            members = one.runnable.members
            if members is not None and self._opened(members, place):
                return one
        return None

    def _opened(self, members: MemberFunctions, place: int) -> bool:
        """Opens the function of a member, and checks its answers to the probe's inputs."""
        with self._artifact.lock, plain_modes():
            try:
                return members.open(place, partial(self._wrong, place))
            except Exception:  # noqa: BLE001  ONNX Runtime has its own classes; the member's program runs
                return False

    def _wrong(self, place: int, run: Function) -> str:
        """Returns, and warns, where the answers are not those of the member's program; "" if they are."""
        wrong = self._difference(place, run)
        self._programs.release_weights()  # those that the member's program has read
        if wrong:
            warnings.warn(
                f"{self._artifact.reader.root}: the session of member {self._artifact.members[place]} gives "
                f"wrong answers here ({wrong}): 'eager' runs instead",
                stacklevel=6,
            )
        return wrong

    def _difference(self, place: int, run: Function) -> str:
        if not self._artifact.options.verified or self._artifact.probe is None:
            return ""
        inputs, check, pattern = self._programs.inputs, self._programs.probe_check, PATTERNS[0]
        own = inputs.per_member(pattern)
        given = [x[place] if stacked else x for x, stacked in zip(inputs.of_probe(pattern), own)]
        with torch.inference_mode():
            found = run(*given)
            if found is None:
                return ""
            weights = self._artifact.weights
            want = check.runs.own(pattern, place, lambda name: weights.of_member(name, place))
            return check.differ(pattern, found, want)


def run_apart(bound: BoundProgram, place: int, values: Sequence[Tensor]) -> list[Any] | None:
    """Runs a member, inside of the gate.

    bound: from `SingleMembers.program`. Returns: its outputs; None if its own program must run, for example
    since the member was replaced meanwhile.
    """
    members = bound.runnable.members
    return members.run(place, values) if members is not None else None


class SingleMember:
    """One member of an entry, for a module that may be copied: a copy has weights of its own."""

    def __init__(self, members: SingleMembers | None = None, place: int = 0) -> None:
        self._members, self.place = members, place

    def program(self, sizes: Mapping[str, int]) -> BoundProgram | None:
        """As `SingleMembers.program`."""
        return self._members.program(self.place, sizes) if self._members is not None else None

    def __deepcopy__(self, memo: Any) -> SingleMember:
        return SingleMember()

    def __reduce__(self) -> Any:
        return SingleMember, ()
