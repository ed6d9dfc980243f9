"""Holds waiting calls by member, and takes batches in turns."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from itertools import islice

from ..catalog.call import Group
from .job import Job, Part


class FairQueue:
    """Waiting calls in lanes, one for each member. It is not safe for several threads.

    Args:
        max_batch: The most rows of a batch.

    Attributes:
        rows: How many rows wait.
        bytes: How many bytes of tensors wait.
    """

    def __init__(self, max_batch: int) -> None:
        self._max_batch = max_batch
        self._lanes: OrderedDict[Hashable, deque[Job]] = OrderedDict()
        self.rows = 0
        self.bytes = 0

    def __len__(self) -> int:
        return sum(map(len, self._lanes.values()))

    def __iter__(self) -> Iterator[Job]:
        for lane in self._lanes.values():
            yield from lane

    def put(self, job: Job) -> None:
        """Adds a call at the end of its lane."""
        lane = self._lanes.get(job.lane)
        if lane is None:
            lane = self._lanes[job.lane] = deque()
        lane.append(job)
        self.rows += job.left
        self.bytes += job.bytes

    def take(self, dropped: Callable[[Job], bool]) -> list[Part]:
        """Takes the calls of the next batch: those that can run together, a turn for each lane.

        A lane gets at most half of the rows while others with calls of the same group wait. A lane that was
        served goes to the end, so that the lane that waited longest is always first.

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
            return [self._take_part(first, max(first.left, 1))]
        lanes = list(islice((lane for lane in self._lanes.values() if self._fits(lane, group)), most))
        share = most if len(lanes) == 1 else max(most // 2, 1)
        parts: list[Part] = []
        room = most
        for limit in (share, most):  # the second turn gives away what no other lane has used
            for lane in lanes:
                had = (
                    sum(p.rows for p in parts if lane and p.job.lane == lane[0].lane) if limit > share else 0
                )
                room -= self._fill(lane, group, min(room, limit - had), parts, dropped)
                if room <= 0:
                    break
            if room <= 0 or share == most:
                break
        for lane_key in dict.fromkeys(p.job.lane for p in parts):
            if lane_key in self._lanes:
                self._lanes.move_to_end(lane_key)
        return parts

    def _first(self, dropped: Callable[[Job], bool]) -> Job | None:
        """Returns the first call of the first lane, without those that must not run."""
        while self._lanes:
            job = next(iter(self._lanes.values()))[0]
            if not dropped(job):
                return job
            self._remove(job)
        return None

    def _most(self, job: Job) -> int:
        """Returns the most rows of a batch of the entry of a call."""
        allowed = job.call.model.layout.most_rows
        return self._max_batch if allowed is None else max(min(self._max_batch, allowed), 1)

    @staticmethod
    def _fits(lane: deque[Job], group: Group) -> bool:
        return bool(lane) and lane[0].call.group == group

    def _fill(
        self,
        lane: deque[Job],
        group: Group,
        room: int,
        parts: list[Part],
        dropped: Callable[[Job], bool],
    ) -> int:
        """Takes rows of a lane into `parts`. Returns: how many."""
        taken = 0
        while taken < room and self._fits(lane, group):
            job = lane[0]
            if dropped(job):
                self._remove(job)
                continue
            part = self._take_part(job, min(room - taken, job.left))
            taken += part.rows
            parts.append(part)
        return taken

    def _take_part(self, job: Job, rows: int) -> Part:
        """Takes rows of the first call of a lane, and the call from the queue if none is left."""
        part = Part(job, job.taken, job.taken + rows)
        job.taken += rows
        self.rows -= rows
        if job.left <= 0:
            self._pop(job)
        return part

    def _remove(self, job: Job) -> None:
        """Removes the first call of a lane with all its rows."""
        self.rows -= job.left
        self._pop(job)

    def _pop(self, job: Job) -> None:
        lane = self._lanes[job.lane]
        lane.popleft()
        self.bytes -= job.bytes
        if not lane:
            del self._lanes[job.lane]
