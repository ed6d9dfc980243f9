"""Limits the bytes of all answers that clients have not read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable

from ..batching.shared_limit import SharedLimit
from ..errors import Busy


class Sending:
    """The large answers that are being sent, over all requests of a process.

    Clients that do not read their answers would keep them in memory. If all answers together are too large,
    the client that has most of them loses its oldest one: its connection is closed.

    gRPC keeps the bytes of an answer that was dropped until the client reads them or its connection ends, so
    they count for a limit of their own. A client that reaches it gets no more large answers.

    Args:
        most: The most bytes of answers that are being sent, and of those that gRPC keeps.
        dropped: Is called for each answer that is dropped.
    """

    def __init__(self, most: int, dropped: Callable[[], None]) -> None:
        self._limit, self._kept, self._dropped = SharedLimit(most), SharedLimit(most), dropped
        self._answers: dict[SentAnswer, None] = {}  # in the order in which they began

    @property
    def bytes(self) -> int:
        """How many bytes are not read."""
        return self._limit.total

    def check_kept(self, client: Hashable, size: int) -> None:
        """Raises: Busy if a client has left too much unread to get one more answer of a size."""
        if not self._kept.admits(client, size):
            raise Busy(
                f"answers of {self._kept.total} bytes were not read in time and are still kept; read "
                "them, or close the connection, and try again"
            )

    def keep(self, client: Hashable, size: int, sent: asyncio.Future[None]) -> None:
        """Counts an answer that was dropped until gRPC has sent or discarded it. sent: done then."""
        self._kept.add(client, size)
        sent.add_done_callback(lambda _: self._kept.remove(client, size))

    def answer(self, client: Hashable, size: int, close: Callable[[], None]) -> SentAnswer:
        """Returns a large answer that is sent now. It counts until its block ends.

        Args:
            client: Who gets it.
            size: Its bytes.
            close: Closes the connection at once.
        """
        while not self._limit.admits(client, size) and (oldest := self._oldest()) is not None:
            self._dropped()
            oldest.drop()
        found = SentAnswer(self, client, size, close)
        self._answers[found] = None
        self._limit.add(client, size)
        return found

    def _oldest(self) -> SentAnswer | None:
        """Returns the oldest answer of the client that has most bytes; None without one."""
        largest = self._limit.largest()
        return next((a for a in self._answers if a.client == largest), None)

    def remove(self, answer: SentAnswer) -> None:
        """Counts an answer no longer."""
        if answer in self._answers:
            del self._answers[answer]
            self._limit.remove(answer.client, answer.size)


class SentAnswer:
    """One large answer that is being sent, for a `with` block.

    Attributes:
        client, size: As given to `Sending.answer`.
        dropped: Whether its connection was closed, so that the rest need not be sent.
    """

    def __init__(self, sending: Sending, client: Hashable, size: int, close: Callable[[], None]) -> None:
        self._sending, self._close = sending, close
        self.client, self.size = client, size
        self.dropped = False

    def drop(self) -> None:
        """Closes the connection."""
        self.dropped = True
        self._sending.remove(self)
        self._close()

    def __enter__(self) -> SentAnswer:
        return self

    def __exit__(self, *_: object) -> None:
        self._sending.remove(self)
