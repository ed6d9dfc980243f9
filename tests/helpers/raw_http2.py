"""Calls of gRPC as bytes on a socket: calls without a message, and with a part of one."""

from __future__ import annotations

import asyncio
import contextlib
import time

from widepack_serve.rpc.schema import SERVICE

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS = 0, 1, 4
_END_HEADERS = 4


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def _head(method: str) -> bytes:
    rows = {
        ":method": "POST",
        ":scheme": "http",
        ":path": f"/{SERVICE}/{method}",
        ":authority": "a",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    return b"".join(bytes([0, len(k)]) + k.encode() + bytes([len(v)]) + v.encode() for k, v in rows.items())


class RawCalls:
    """Calls on one connection.

    Args:
        address: Of the server.
        client: The address of the client.
    """

    def __init__(self, address: str, client: str = "127.0.0.1") -> None:
        host, port = address.rsplit(":", 1)
        self._opening = asyncio.open_connection(host, int(port), local_addr=(client, 0))
        self._stream = -1

    async def open(self) -> RawCalls:
        """Connects."""
        self._reader, self._writer = await self._opening
        self._writer.write(_PREFACE + _frame(_SETTINGS, 0, 0, b""))
        return self

    def begin(self, message: bytes = b"", size: int = 0, method: str = "ModelInfer") -> None:
        """Begins a call. message: the first of `size` bytes."""
        self._stream += 2
        data = _frame(_HEADERS, _END_HEADERS, self._stream, _head(method))
        if size:
            data += _frame(_DATA, 0, self._stream, b"\0" + size.to_bytes(4, "big") + message)
        self._writer.write(data)

    def go_on(self, message: bytes) -> None:
        """Sends the rest of the message of the last call."""
        self._writer.write(_frame(_DATA, 1, self._stream, message))

    async def received(self, seconds: float) -> bytes:
        """Returns all that the server sends for some time."""
        found, end = b"", time.monotonic() + seconds
        with contextlib.suppress(asyncio.TimeoutError):
            while part := await asyncio.wait_for(self._reader.read(1 << 16), end - time.monotonic()):
                found += part
        return found

    async def close(self) -> None:
        """Closes the connection at once."""
        self._writer.transport.abort()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
