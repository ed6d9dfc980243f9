"""Receives the checkpoint of a swap as the body of a request, into a file."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.types import Receive, Scope

from ..errors import RequestError, TooLarge
from ..lifecycle.time_limit import TimeLimit
from .receive import check_connected, check_length

_HEADER = 9
"""A safetensors file begins with the length of its header, 8 bytes, and the bracket of a JSON object."""


@asynccontextmanager
async def received_file(scope: Scope, receive: Receive, most: int, seconds: float) -> AsyncIterator[Path]:
    """Receives a safetensors file. It exists in the block alone.

    Args:
        scope, receive: Of the request.
        most: The most bytes.
        seconds: In which the body must arrive.

    Raises:
        TooLarge: It has more bytes. The rest is not read.
        TooSlow: It did not arrive in time.
        RequestError: It is no safetensors file.
        Disconnected: The client closed the connection.
    """
    check_length(scope, most)
    with tempfile.NamedTemporaryFile(prefix="widepack-swap-", suffix=".safetensors") as file:
        begin, size, more = b"", 0, True
        with TimeLimit(seconds, "body"):
            while more:
                message = await receive()
                check_connected(message)
                part: bytes = message.get("body", b"")
                more = message.get("more_body", False)
                size += len(part)
                if size > most:
                    raise TooLarge(f"the body has over {most} bytes, the limit for this member's checkpoint")
                begin += part[: _HEADER - len(begin)]
                if len(begin) == _HEADER and not begin.endswith(b"{"):
                    break
                file.write(part)
        if not begin.endswith(b"{") or len(begin) != _HEADER:
            raise RequestError(
                "the body is not a safetensors file; send one, or the name of a checkpoint as JSON without "
                "Content-Type: application/octet-stream"
            )
        file.flush()
        yield Path(file.name)
