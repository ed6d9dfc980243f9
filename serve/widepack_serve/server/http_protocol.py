"""Limits the time in which the head of a request must arrive. The app limits that of the body.

uvicorn itself closes connections only that are idle after an answer.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..errors import TooSlow
from ..protocol.response import document_body


def protocol_class(seconds: float) -> type[HttpToolsProtocol]:
    """Returns uvicorn's protocol with a limit of the time in which the head of a request must arrive.

    The time begins with the connection. On a connection that stays open, it begins with the first bytes after
    the last request. A client that has sent a part of a head gets 408. One that has sent nothing gets no
    answer, since it would take the answer for that of its next request.

    Args:
        seconds: The limit.
    """

    class LimitedProtocol(HttpToolsProtocol):
        """A connection with the limit."""

        _head_timer: asyncio.TimerHandle | None = None
        _head_begun = False

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            """Begins the time of the first head."""
            super().connection_made(transport)
            self._start_head_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            """Ends the time."""
            self._stop_head_timer()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            """Reads data, and begins the time of the next head if no request is read or answered."""
            super().data_received(data)
            if self._head_timer is None and not self.transport.is_closing() and self.cycle.response_complete:
                self._start_head_timer()

        def on_message_begin(self) -> None:
            """Notes that a head has begun."""
            self._head_begun = True
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            """Ends the time: the head is complete."""
            self._head_begun = False
            self._stop_head_timer()
            super().on_headers_complete()

        def _start_head_timer(self) -> None:
            self._head_timer = self.loop.call_later(seconds, self._expire_head)

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
