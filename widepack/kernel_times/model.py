"""Declares what a device's model of times gives: the time of each call, from sizes alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from .call_time import CallTime


class TimeModel(Protocol):
    """Predicts the calls of one device. device: its kind, `cpu` or `cuda`."""

    @property
    def device(self) -> str: ...

    @property
    def place(self) -> str:
        """The device in words, for a reason: `an H100`."""
        ...

    def call(
        self, op: str, args: Any, kwargs: Mapping[str, Any], weights: Collection[int]
    ) -> tuple[Any, CallTime]:
        """Runs an op on torch's meta device. Returns its result and its time.

        Args:
            op: The name of the op.
            args: Its arguments, with tensors on the meta device.
            kwargs: The same, by name.
            weights: The memory of weights among the arguments, as `memory_id` returns it.
        """
        ...

    def views(self, count: int) -> CallTime:
        """Returns the time of a number of views."""
        ...

    def copy(self, values: Sequence[Tensor]) -> CallTime:
        """Returns the time in which each value is copied."""
        ...
