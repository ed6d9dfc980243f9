"""Limits the times in which the head of a request must arrive, and in which a client must read its answer.
The app limits that of the body.

uvicorn itself closes connections only that are idle after an answer.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..errors import TooSlow
from ..protocol.response import document_body
from ..rest.send import ABORT


def protocol_class(seconds: float, send_seconds: float) -> type[HttpToolsProtocol]:
    """Returns uvicorn's protocol with limits of the times in which a head must arrive, and answers be read.

    The time begins with the connection. On a connection that stays open, it begins with the first bytes after
    the last request. A client that has sent a part of a head gets 408. One that has sent nothing gets no
    answer, since it would take the answer for that of its next request.

    A client that reads nothing for some time, while the connection holds as much of its answers as it may,
    loses the connection at once.

    Args:
        seconds: The limit for heads.
        send_seconds: The limit for answers.
    """

    class LimitedProtocol(HttpToolsProtocol):
        """A connection with the limits."""

        _unread_timer: asyncio.TimerHandle | None = None
        _head_timer: asyncio.TimerHandle | None = None
        _head_begun = False

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            """Begins the time of the first head."""
            super().connection_made(transport)
            self._start_head_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            """Ends the times."""
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
            cast(dict[str, Any], self.scope)[ABORT] = self.transport.abort

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
