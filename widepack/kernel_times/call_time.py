"""Holds the time of a call: what a device and its host spend on it, and what bounds the kernels."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallTime:
    """The time of a call.

    host: seconds of the host. device: seconds of the device. kernels: how many it starts. computing, moving:
    seconds of the device by what bounds the kernels. made: the bytes of new memory, on a CPU. A CPU is its
    own host: its seconds are the device's.
    """

    host: float = 0.0
    device: float = 0.0
    kernels: int = 0
    computing: float = 0.0
    moving: float = 0.0
    made: float = 0.0

    def __add__(self, other: CallTime) -> CallTime:
        return CallTime(
            self.host + other.host,
            self.device + other.device,
            self.kernels + other.kernels,
            self.computing + other.computing,
            self.moving + other.moving,
            self.made + other.made,
        )

    def times(self, count: int) -> CallTime:
        """Returns the time of `count` such calls."""
        return CallTime(
            count * self.host,
            count * self.device,
            count * self.kernels,
            count * self.computing,
            count * self.moving,
            count * self.made,
        )

    @property
    def seconds(self) -> float:
        """The time: host and device work at once, and the slower one counts."""
        return max(self.host, self.device)

    @property
    def bound(self) -> str:
        """What takes the time: `starts`, `computing` or `moving bytes`."""
        if self.host >= self.device or self.device > 2 * (self.computing + self.moving):
            return "starts"
        return "computing" if self.computing > self.moving else "moving bytes"


NOTHING = CallTime()
