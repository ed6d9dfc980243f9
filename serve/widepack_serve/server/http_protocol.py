"""Limits the connections of clients, the time in which the head of a request must arrive, and that in which a
client must read its answer. The app limits the time of the body.

uvicorn itself closes connections only that are idle after an answer, and beyond its limit of connections it
refuses the requests of all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from ..errors import TooSlow
from ..protocol.response import document_body
from ..rest.send import ABORT
from .connections import Connections

_REFUSED_S = 1.0
"""For how long a connection beyond the limit may stay open without a request."""


class JoinedWrites:
    """Writes the head of an answer together with the first part of its body.

    uvicorn writes them one after the other: each is a system call, and the client wakes up twice.

    Args:
        transport: Of the connection.
    """

    __slots__ = ("_head", "_transport", "write")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport, self._head = transport, b""
        self.write: Callable[[bytes], None] = self._keep

    def _keep(self, head: bytes) -> None:
        self._head, self.write = head, self._join

    def _join(self, data: bytes) -> None:
        self._transport.writelines([self._head, data])
        self.write = self._transport.write

    def close(self) -> None:
        """Closes the connection."""
        self._transport.close()


def _prepare_answer(cycle: RequestResponseCycle) -> None:
    """Gives the app the way to close a connection, and joins the writes of the answer.

    An answer to HEAD has no body, and `100 Continue` precedes the head.
    """
    cast(dict[str, Any], cycle.scope)[ABORT] = cycle.transport.abort
    if cycle.scope["method"] != "HEAD" and not cycle.waiting_for_100_continue:
        cycle.transport = cast(asyncio.Transport, JoinedWrites(cycle.transport))


def protocol_class(seconds: float, send_seconds: float, most: int | None = None) -> type[HttpToolsProtocol]:
    """Returns uvicorn's protocol with limits of the times in which a head must arrive, and answers be read.

    The time begins with the connection. On a connection that stays open, it begins with the first bytes after
    the last request. A client that has sent a part of a head gets 408. One that has sent nothing gets no
    answer, since it would take the answer for that of its next request.

    Clients share the limit of connections. One beyond it gets 503 for its first request, and is closed if
    none arrives at once.

    A client that reads nothing for some time, while the connection holds as much of its answers as it may,
    loses the connection at once.

    Args:
        seconds: The limit for heads.
        send_seconds: The limit for answers.
        most: The most connections at once; None for any number.
    """
    connections = Connections(most)

    class LimitedProtocol(HttpToolsProtocol):
        """A connection with the limits."""

        _unread_timer: asyncio.TimerHandle | None = None
        _head_timer: asyncio.TimerHandle | None = None
        _head_begun = False

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            """Counts the connection, and begins the time of the first head."""
            super().connection_made(transport)
            self._place = connections.place(self.client)
            if self._place.closed:
                transport.abort()
            elif self._place.admitted:
                self._start_head_timer(seconds)
            else:
                self.limit_concurrency = 0  # uvicorn answers its first request with 503
                self._start_head_timer(min(seconds, _REFUSED_S))

        def connection_lost(self, exc: Exception | None) -> None:
            """Counts the connection no longer, and ends the times."""
            self._place.leave()
            self._stop_head_timer()
            self._stop_unread_timer()
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            """Begins the time in which the client must read."""
            super().pause_writing()
            if self._unread_timer is None:
                self._unread_timer = self.loop.call_later(send_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            """Ends it: the client has read."""
            self._stop_unread_timer()
            super().resume_writing()

        def _stop_unread_timer(self) -> None:
            if self._unread_timer is not None:
                self._unread_timer.cancel()
                self._unread_timer = None

        def data_received(self, data: bytes) -> None:
            """Reads data, and begins the time of the next head if no request is read or answered."""
            super().data_received(data)
            if self._head_timer is None and not self.transport.is_closing() and self.cycle.response_complete:
                self._start_head_timer(seconds)

        def on_message_begin(self) -> None:
            """Notes that a head has begun."""
            self._head_begun = True
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            """Ends the time: the head is complete."""
            self._head_begun = False
            self._stop_head_timer()
            super().on_headers_complete()
            _prepare_answer(self.cycle)

        def _start_head_timer(self, limit: float) -> None:
            self._head_timer = self.loop.call_later(limit, self._expire_head)

        def _stop_head_timer(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _expire_head(self) -> None:
            self._head_timer = None
            if self.transport.is_closing():
                return
            if self._head_begun:
                self.transport.write(_refusal(seconds))
            self.transport.close()

    return LimitedProtocol


def _refusal(seconds: float) -> bytes:
    """Returns the answer to a head that is too slow, as HTTP."""
    error = TooSlow(f"the head of the request did not arrive within {seconds:g} seconds")
    body = document_body({"error": str(error)})
    lines = (
        f"HTTP/1.1 {error.status} Request Timeout",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
    )
    return "\r\n".join((*lines, "", "")).encode() + body
