"""Gives the time of a call on a CPU, from a profile of measured kernels."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..ir import ops
from .call_time import CallTime
from .kernel_work import KernelWork
from .profile import Profile
from .work import works_of


class CpuModel:
    """Predicts calls on a CPU.

    Args:
        profile: The kernel times.
        streamed: The bytes of weights that a whole call reads.
    """

    device = "cpu"

    def __init__(self, profile: Profile, streamed: float = 0.0) -> None:
        self.profile, self.streamed = profile, streamed

    @property
    def place(self) -> str:
        """The processor, in words."""
        return self.profile.machine

    def call(
        self, op: str, args: Any, kwargs: Mapping[str, Any], weights: Collection[int]
    ) -> tuple[Any, CallTime]:
        """Runs an op on torch's meta device. Returns its result and its time. Arguments: as `TimeModel`."""
        result, works = works_of(op, args, kwargs, weights)
        if not works:
            return result, CallTime() if op in ops.PYTHON else CallTime(device=self.profile.view_s)
        return result, sum((self.kernel(w) for w in works), CallTime())

    def views(self, count: int) -> CallTime:
        """Returns the time of a number of views."""
        return CallTime(device=count * self.profile.view_s)

    def copy(self, values: Sequence[Tensor]) -> CallTime:
        """Returns the time in which each value is copied."""
        works = [KernelWork("joining", elements=float(v.numel())) for v in values]
        return sum((self.kernel(w) for w in works), CallTime())

    def new_memory(self, size: float) -> CallTime:
        """Returns the time that a result of `size` bytes takes more in memory of its own than in place."""
        return CallTime(device=size * self.profile.fresh.at(size))

    def pages(self, size: float) -> CallTime:
        """Returns the time in which the system gives `size` bytes of new memory."""
        curve = self.profile.fresh
        return CallTime(device=size * max(0.0, curve.values[-1] - curve.at(size / 4)))

    def kernel(self, work: KernelWork) -> CallTime:
        """Returns the time of a kernel."""
        seconds, start = self.profile.kernel(work, self.streamed), self.profile.start(work)
        moving = self.profile.moving(work, self.streamed)
        rest = max(0.0, seconds - start - moving)
        computing, moved = (rest, moving) if work.count else (0.0, rest)
        return CallTime(0.0, seconds, 1, computing, moved, work.made_bytes)
