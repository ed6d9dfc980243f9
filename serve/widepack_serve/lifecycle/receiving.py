"""Limits the bytes of all bodies that have arrived and are not read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from concurrent.futures import Future

from ..batching.shared_limit import SharedLimit
from ..errors import Busy


class Receiving:
    """The bodies that are being received, unpacked and read, over all requests of a process.

    Bytes count when they arrive, not when a client announces them: clients that announce large bodies and
    send nothing keep nobody out. Clients share the limit.

    Args:
        most: The most bytes.
        rejected: Is called for each body that is refused.
    """

    def __init__(self, most: int, rejected: Callable[[], None]) -> None:
        self._limit, self._rejected = SharedLimit(most), rejected

    @property
    def bytes(self) -> int:
        """How many bytes have arrived."""
        return self._limit.total

    def body(self, client: Hashable = "") -> PartialBody:
        """Returns the bytes of one more body of a client. They count until its block ends."""
        return PartialBody(self, client)

    def add(self, client: Hashable, count: int) -> None:
        """Adds bytes that arrived. Raises: Busy if they are too many."""
        if not self._limit.admits(client, count):
            self._rejected()
            raise Busy(
                f"bodies of {self.bytes} bytes are being received, and the limit is {self._limit.most}; "
                "try again"
            )
        self._limit.add(client, count)

    def remove(self, client: Hashable, count: int) -> None:
        """Removes bytes of a body that was read."""
        self._limit.remove(client, count)


class PartialBody:
    """The bytes of one body that is being received, for a `with` block."""

    def __init__(self, receiving: Receiving, client: Hashable) -> None:
        self._receiving, self._client = receiving, client
        self._bytes = 0
        self._ended = False

    def __enter__(self) -> PartialBody:
        return self

    def add(self, count: int) -> None:
        """Adds bytes that arrived. Raises: Busy if all bodies have too many."""
        if self._ended:
            return  # a thread still unpacks a body that nobody waits for
        self._receiving.add(self._client, count)
        self._bytes += count

    def clear(self) -> None:
        """Removes the bytes that were added."""
        if self._bytes:
            self._receiving.remove(self._client, self._bytes)
            self._bytes = 0

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self.clear()


class Sizes:
    """Counts the bytes of pieces on another thread than that of the event loop."""

    def __init__(self, held: PartialBody) -> None:
        self._held, self._loop = held, asyncio.get_running_loop()

    def append(self, count: int) -> None:
        """Counts bytes. Raises: Busy."""
        found: Future[None] = Future()
        self._loop.call_soon_threadsafe(self._add, count, found)
        try:
            found.result()
        finally:
            del found  # an error holds this frame, and the future holds the error

    def _add(self, count: int, found: Future[None]) -> None:
        try:
            self._held.add(count)
        except Busy as e:
            found.set_exception(e)
        else:
            found.set_result(None)
        finally:
            del found
