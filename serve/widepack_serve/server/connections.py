"""Counts connections. Clients share their limit."""

from __future__ import annotations

from ..batching.shared_limit import SharedLimit, client_of

_MOST_REFUSED = 256


class Connections:
    """The connections of one process.

    Args:
        most: The most connections; None for any number.
    """

    def __init__(self, most: int | None) -> None:
        self._counted = None if most is None else SharedLimit(most)
        self._refused = SharedLimit(_MOST_REFUSED)

    def place(self, address: tuple[str, int] | None) -> Place:
        """Returns the place of one more connection, which may be none.

        address: of the client; None if it is unknown.
        """
        client = client_of(address[0] if address else "")
        if self._counted is None:
            return Place(client, None, refused=False)
        if self._counted.admits(client, 1):
            return Place(client, self._counted, refused=False)
        return Place(client, self._refused if self._refused.admits(client, 1) else None, refused=True)


class Place:
    """The place of one connection.

    Attributes:
        admitted: Whether the connection is within the limit.
        closed: Whether there are so many beyond it that this one does not even get an answer.
    """

    def __init__(self, client: str, limit: SharedLimit | None, *, refused: bool) -> None:
        self._client, self._limit = client, limit
        self.admitted, self.closed = not refused, refused and limit is None
        if limit is not None:
            limit.add(client, 1)

    def leave(self) -> None:
        """Counts the connection no longer."""
        if self._limit is not None:
            self._limit.remove(self._client, 1)
            self._limit = None
