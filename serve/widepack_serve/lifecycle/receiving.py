"""Limits the bytes of all bodies that have arrived in part."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import Busy


class Receiving:
    """The bodies that are being received, over all requests of a process.

    Bytes count when they arrive, not when a client announces them: clients that announce large bodies and
    send nothing keep nobody out.

    Args:
        most: The most bytes.
        rejected: Is called for each body that is refused.

    Attributes:
        bytes: How many bytes have arrived.
    """

    def __init__(self, most: int, rejected: Callable[[], None]) -> None:
        self._most, self._rejected = most, rejected
        self.bytes = 0

    def body(self) -> PartialBody:
        """Returns the bytes of one more body. They count until its block ends."""
        return PartialBody(self)

    def add(self, count: int) -> None:
        """Adds bytes that arrived. Raises: Busy if they are too many."""
        if self.bytes + count > self._most:
            self._rejected()
            raise Busy(
                f"bodies of {self.bytes} bytes are being received, and the limit is {self._most}; try again"
            )
        self.bytes += count


class PartialBody:
    """The bytes of one body that is being received, for a `with` block."""

    def __init__(self, receiving: Receiving) -> None:
        self._receiving = receiving
        self._bytes = 0

    def __enter__(self) -> PartialBody:
        return self

    def add(self, count: int) -> None:
        """Adds bytes that arrived. Raises: Busy if all bodies have too many."""
        self._receiving.add(count)
        self._bytes += count

    def __exit__(self, *_: object) -> None:
        self._receiving.bytes -= self._bytes
