"""Sends answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.types import Scope, Send

from ..errors import RequestError
from ..lifecycle.sending import SentAnswer
from ..protocol.growing import Body
from ..protocol.response import document_body
from .receive import Disconnected

JSON = b"application/json"
BINARY = b"application/octet-stream"
TEXT = b"text/plain; version=0.0.4; charset=utf-8"

PIECE = 1 << 17
"""The most bytes of an answer that are sent at once."""
ABORT = "widepack.abort"
"""The key of a scope that has a function to close its connection at once."""

CLOSE = (b"connection", b"close")

Headers = tuple[tuple[bytes, bytes], ...]


def closer(scope: Scope) -> Callable[[], None]:
    """Returns what closes the connection of a request at once. Under another server than `widepack serve` it
    ends the task of the request.
    """
    found: Callable[[], None] | None = scope.get(ABORT)
    if found is not None:
        return found
    task = asyncio.current_task()
    return (lambda: None) if task is None else (lambda: None if task.done() else _cancel(task))


def _cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()


async def send_body(
    send: Send,
    body: Body,
    kind: bytes = JSON,
    status: int = 200,
    headers: Headers = (),
    large: Callable[[int], SentAnswer] | None = None,
) -> None:
    """Sends an answer. A large one is sent in pieces, each when the client has read enough of those before.

    Args:
        send: Of the request.
        body: The answer.
        kind: Its media type.
        status: The HTTP status.
        headers: More headers.
        large: Counts a large answer of so many bytes; None for an answer that is small in any case.

    Raises:
        Disconnected: The connection is closed.
    """
    start = {
        "type": "http.response.start",
        "status": status,
        "headers": [(b"content-type", kind), (b"content-length", b"%d" % len(body)), *headers],
    }
    try:
        await send(start)
        if large is None or len(body) <= PIECE:
            await send({"type": "http.response.body", "body": body[: len(body)]})
        else:
            await _send_pieces(send, body, large)
    except (RuntimeError, OSError) as e:  # the server closes a connection on which something else came
        raise Disconnected from e


async def _send_pieces(send: Send, body: Body, large: Callable[[int], SentAnswer]) -> None:
    """Sends a large body. Raises: Disconnected if it is dropped."""
    with large(len(body)) as answer:
        for at in range(0, len(body), PIECE):
            if answer.dropped:
                await asyncio.sleep(0)  # the connection is closed in this turn of the event loop
                raise Disconnected
            piece = body[at : at + PIECE]
            await send({"type": "http.response.body", "body": piece, "more_body": at + PIECE < len(body)})


async def send_document(send: Send, document: Any, status: int = 200, headers: Headers = ()) -> None:
    """Sends a JSON document."""
    await send_body(send, document_body(document), JSON, status, headers)


async def send_error(send: Send, error: RequestError, headers: Headers = ()) -> None:
    """Sends the error of a request, with the seconds to wait if it has them."""
    if error.retry_after is not None:
        headers = (*headers, (b"retry-after", b"%d" % error.retry_after))
    if error.status == 401:
        headers = (*headers, (b"www-authenticate", b"Bearer"))
    if error.status == 408:
        headers = (*headers, CLOSE)  # the rest of the body may never come
    await send_document(send, {"error": str(error)}, error.status, headers)
