"""Holds waiting calls by member, and takes batches in turns."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Hashable, Iterator
from itertools import islice

from ..catalog.call import Group
from .job import Job, Part
from .shared_limit import SharedLimit

Lane = OrderedDict[Group | None, deque[Job]]
"""The waiting calls of one client and one member, by their groups."""


class FairQueue:
    """Waiting calls in lanes, one for each client and member. It is not safe for several threads.

    A call with more rows than a batch counts as one batch for the limit of rows, since it takes turns with
    the others: it delays them by a batch, not by all its rows.

    Args:
        max_batch: The most rows of a batch.
        max_rows: The most rows that wait.
        max_bytes: The most bytes of tensors that wait.

    Attributes:
        rows: How many rows wait.
        counted: How many rows each client has waiting, as they count for the limit.
        bytes: How many bytes of tensors each client has waiting.
    """

    def __init__(self, max_batch: int, max_rows: int, max_bytes: int) -> None:
        self._max_batch = max_batch
        self._lanes: OrderedDict[Hashable, Lane] = OrderedDict()
        self.rows = 0
        self.counted = SharedLimit(max_rows)
        self.bytes = SharedLimit(max_bytes)

    def __len__(self) -> int:
        return sum(len(line) for lane in self._lanes.values() for line in lane.values())

    def __iter__(self) -> Iterator[Job]:
        for lane in self._lanes.values():
            for line in lane.values():
                yield from line

    def weight(self, job: Job) -> int:
        """Returns how many rows of a call count for the limit."""
        return min(job.left, self._most(job))

    def put(self, job: Job) -> None:
        """Adds a call at the end of the calls of its group in its lane."""
        job.weight = self.weight(job)
        self.counted.add(job.client, job.weight)
        self.bytes.add(job.client, job.bytes)
        lane = self._lanes.get(job.lane)
        if lane is None:
            lane = self._lanes[job.lane] = OrderedDict()
        line = lane.get(job.call.group)
        if line is None:
            line = lane[job.call.group] = deque()
        line.append(job)
        self.rows += job.left

    def restart(self, job: Job) -> None:
        """Makes all rows of a call wait again."""
        waits = job.left > 0
        if waits:
            self.rows += job.taken
        job.taken, job.again = 0, False
        job.restarts += 1
        if not waits:
            self.put(job)

    def take(self, dropped: Callable[[Job], bool]) -> list[Part]:
        """Takes the calls of the next batch: those that can run together, a turn for each lane.

        A lane gets at most half of the rows while others with calls of the same group wait. A lane that was
        served goes to the end, so that the lane that waited longest is always first. In a lane, the groups
        take turns in the same way.

        Args:
            dropped: Whether a call must not run: it has ended it itself then.

        Returns:
            The parts; empty if nothing waits.
        """
        first = self._first(dropped)
        if first is None:
            return []
        group, most = first.call.group, self._most(first)
        if group is None:
            turns = {first.lane}
            parts = [self._take_part(first, max(first.left, 1))]
            self._end_turns(parts, group, turns)
            return parts
        lanes = list(islice(((key, lane) for key, lane in self._lanes.items() if group in lane), most))
        turns = {key for key, lane in lanes if next(iter(lane)) == group}
        lines = [lane[group] for _, lane in lanes]
        share = most if len(lines) == 1 else max(most // 2, 1)
        parts = []
        room = most
        for limit in (share, most):  # the second turn gives away what no other lane has used
            for line in lines:
                had = (
                    sum(p.rows for p in parts if line and p.job.lane == line[0].lane) if limit > share else 0
                )
                room -= self._fill(line, min(room, limit - had), parts, dropped)
                if room <= 0:
                    break
            if room <= 0 or share == most:
                break
        self._end_turns(parts, group, turns)
        return parts

    def _end_turns(self, parts: list[Part], group: Group | None, turns: Collection[Hashable]) -> None:
        """Moves the lanes that were served to the end, and the group to the end of each.

        turns: the lanes whose first calls were of the group. Others stay where they are: their turn is that
        of their first calls.
        """
        for key in dict.fromkeys(p.job.lane for p in parts):
            lane = self._lanes.get(key)
            if lane is None:
                continue
            if key in turns:
                self._lanes.move_to_end(key)
            if group in lane:
                lane.move_to_end(group)

    def _first(self, dropped: Callable[[Job], bool]) -> Job | None:
        """Returns the first call of the first lane, without those that must not run."""
        while self._lanes:
            lane = next(iter(self._lanes.values()))
            job = next(iter(lane.values()))[0]
            if not dropped(job):
                return job
            self._remove(job)
        return None

    def discard(self, dropped: Callable[[Job], bool]) -> None:
        """Removes the calls that must not run. dropped: whether a call must not: it has ended it itself
        then.
        """
        for job in [j for j in self if dropped(j)]:
            lane = self._lanes[job.lane]
            line = lane[job.call.group]
            line.remove(job)
            self.rows -= job.left
            self._forget(job, lane, line)

    def _most(self, job: Job) -> int:
        """Returns the most rows of a batch of the entry of a call."""
        layout = job.call.model.layout
        most = self._max_batch if layout.most_rows is None else min(self._max_batch, layout.most_rows)
        return max(most, layout.least_rows)

    def _fill(self, line: deque[Job], room: int, parts: list[Part], dropped: Callable[[Job], bool]) -> int:
        """Takes rows of calls of one lane and group into `parts`. Returns: how many.

        Only a call with more rows than a batch is divided, into parts that the model takes.
        """
        taken = 0
        while line and taken < room:
            job = line[0]
            if dropped(job):
                self._remove(job)
                continue
            rows = self._share(job, room - taken)
            if not rows:
                if parts:
                    break  # it is the first of another batch
                rows = self._share(job, self._most(job)) or job.left
            part = self._take_part(job, rows)
            taken += part.rows
            parts.append(part)
            if line and line[0] is job:
                line.rotate(-1)  # the others of the line have their turn before its next part
                if len(line) == 1:
                    break
        return taken

    def _share(self, job: Job, room: int) -> int:
        """Returns how many rows of a call fit: all, some of a large call, or 0."""
        if job.left <= room:
            return job.left
        layout = job.call.model.layout
        if not layout.divisible or (job.call.rows <= self._most(job) and not job.taken):
            return 0
        rows = min(room, job.left - layout.least_rows)  # the rest is enough for a call of its own
        return rows if rows >= layout.least_rows else 0

    def _take_part(self, job: Job, rows: int) -> Part:
        """Takes rows of a call that is the first of its group in its lane, and the call from the queue if
        none is left.
        """
        part = Part(job, job.taken, job.taken + rows)
        job.taken += rows
        self.rows -= rows
        if job.left <= 0:
            self._pop(job)
        return part

    def _remove(self, job: Job) -> None:
        """Removes a call that is the first of its group in its lane, with all its rows."""
        self.rows -= job.left
        self._pop(job)

    def _pop(self, job: Job) -> None:
        lane = self._lanes[job.lane]
        line = lane[job.call.group]
        line.popleft()
        self._forget(job, lane, line)

    def _forget(self, job: Job, lane: Lane, line: deque[Job]) -> None:
        """Counts a call that was removed no longer, and removes its line and its lane if they are empty."""
        self.counted.remove(job.client, job.weight)
        self.bytes.remove(job.client, job.bytes)
        if not line:
            del lane[job.call.group]
            if not lane:
                del self._lanes[job.lane]
