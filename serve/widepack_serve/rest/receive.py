"""Reads bodies within limits of size and time."""

from __future__ import annotations

from starlette.types import Message, Receive, Scope

from ..batching.shared_limit import client_of
from ..errors import RequestError, TooLarge
from ..lifecycle.receiving import PartialBody
from ..lifecycle.time_limit import TimeLimit
from ..protocol.growing import SMALL, Body, Growing

_MAX_DIGITS = 15


class Disconnected(Exception):
    """Raised if the client closed the connection before its body was complete."""


def header(scope: Scope, name: bytes) -> str | None:
    """Returns a header of a request; None without it. name: in lower case."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value.decode("latin-1"))
    return None


def client_of_scope(scope: Scope) -> str:
    """Returns who sent a request: its address, as the server gives it."""
    found = scope.get("client")
    return client_of(str(found[0])) if found else ""


async def read_body(scope: Scope, receive: Receive, most: int, seconds: float, held: PartialBody) -> Body:
    """Returns the body of a request.

    A small body that arrives whole holds no memory while others arrive, and does not count for the limit of
    all bodies.

    Args:
        scope: Of the request.
        receive: Of the request.
        most: The most bytes.
        seconds: In which the body must arrive.
        held: What counts the bytes of the body, until its block ends.

    Raises:
        TooLarge: The body has more bytes. The rest is not read.
        TooSlow: It did not arrive in time.
        Busy: All bodies that are being received have too many bytes.
        Disconnected: The client closed the connection.
    """
    check_length(scope, most)
    with TimeLimit(seconds, "body"):
        message = await receive()
        check_connected(message)
        body: bytes = message.get("body", b"")
        if not message.get("more_body"):
            if len(body) > SMALL:
                held.add(len(body))
            _check_within(len(body), most)
            return body
        return await _rest(receive, body, most, held)


def check_length(scope: Scope, most: int) -> None:
    """Checks the header Content-Length. Raises: RequestError; TooLarge."""
    length = header(scope, b"content-length")
    if length is None:
        return
    if not (length.isascii() and length.isdigit()):
        raise RequestError(f"Content-Length is {length[:20]!r}; it is a number of bytes")
    if len(length) > _MAX_DIGITS or int(length) > most:
        raise TooLarge(f"the body has {length[:20]} bytes; the limit is {most}")


def check_connected(message: Message) -> None:
    """Raises: Disconnected if a message says so."""
    if message["type"] == "http.disconnect":
        raise Disconnected


def _check_within(size: int, most: int) -> None:
    if size > most:
        raise TooLarge(f"the body has over {most} bytes, the limit")


async def _rest(receive: Receive, part: bytes, most: int, arrived: PartialBody) -> Body:
    body, more = Growing(), True
    while True:
        arrived.add(len(part))
        _check_within(body.size + len(part), most)
        body.append(part)
        if not more:
            return body.whole()
        message = await receive()
        check_connected(message)
        part, more = message.get("body", b""), message.get("more_body", False)
