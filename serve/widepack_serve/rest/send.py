"""Sends answers."""

from __future__ import annotations

from typing import Any

from starlette.types import Send

from ..errors import RequestError
from ..protocol.response import document_body
from .receive import Disconnected

JSON = b"application/json"
BINARY = b"application/octet-stream"
TEXT = b"text/plain; version=0.0.4; charset=utf-8"

CLOSE = (b"connection", b"close")

Headers = tuple[tuple[bytes, bytes], ...]


async def send_body(
    send: Send, body: bytes, kind: bytes = JSON, status: int = 200, headers: Headers = ()
) -> None:
    """Sends an answer. kind: its media type. Raises: Disconnected if the connection is closed."""
    start = {
        "type": "http.response.start",
        "status": status,
        "headers": [(b"content-type", kind), (b"content-length", b"%d" % len(body)), *headers],
    }
    try:
        await send(start)
        await send({"type": "http.response.body", "body": body})
    except (RuntimeError, OSError) as e:  # the server closes a connection on which something else came
        raise Disconnected from e


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
