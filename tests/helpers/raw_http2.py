"""Calls of gRPC as bytes on a socket: calls without a message, and with a part of one."""

from __future__ import annotations

import asyncio
import contextlib
import time

from widepack_serve.rpc.schema import SERVICE

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS, _WINDOW = 0, 1, 4, 8
_END_HEADERS, _ACKNOWLEDGED = 4, 1


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Returns a frame of HTTP/2 (RFC 9113, 4.1)."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def head(method: str) -> bytes:
    """Returns the headers of a call, as HPACK literals without indexing (RFC 7541, 6.2.2)."""
    rows = {
        ":method": "POST",
        ":scheme": "http",
        ":path": f"/{SERVICE}/{method}",
        ":authority": "a",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    return b"".join(bytes([0, len(k)]) + k.encode() + bytes([len(v)]) + v.encode() for k, v in rows.items())


def allowed(received: bytes, call: int) -> int:
    """Returns how many bytes a server lets a call send besides the first ones (RFC 9113, 6.9).

    received: Whole frames that it has sent. call: its number on the connection, from 0.
    """
    found = at = 0
    while at < len(received):
        size, stream = (int.from_bytes(received[a:b], "big") for a, b in ((at, at + 3), (at + 5, at + 9)))
        if received[at + 3] == _WINDOW and stream == 2 * call + 1:
            found += int.from_bytes(received[at + 9 : at + 13], "big")
        at += 9 + size
    return found


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
        self._writer.write(_PREFACE + frame(_SETTINGS, 0, 0, b""))
        head = await self._reader.readexactly(9)  # of the settings of the server, which are acknowledged:
        await self._reader.readexactly(int.from_bytes(head[:3], "big"))
        self._writer.write(frame(_SETTINGS, _ACKNOWLEDGED, 0, b""))  # else it takes 64 KiB of a message
        return self

    def begin(self, message: bytes = b"", size: int = 0, method: str = "ModelInfer") -> None:
        """Begins a call. message: the first of `size` bytes."""
        self._stream += 2
        data = frame(_HEADERS, _END_HEADERS, self._stream, head(method))
        if size:
            data += frame(_DATA, 0, self._stream, b"\0" + size.to_bytes(4, "big") + message)
        self._writer.write(data)

    async def go_on(self, message: bytes, *, last: bool = False) -> None:
        """Sends more of the message of the last call. last: whether it is the rest. Raises: OSError."""
        self._writer.write(frame(_DATA, last, self._stream, message))
        await self._writer.drain()

    async def received(self, seconds: float, until: bytes | None = None) -> bytes:
        """Returns what the server sends for some time, or until it has sent some bytes. Raises: OSError."""
        found, end = b"", time.monotonic() + seconds
        with contextlib.suppress(asyncio.TimeoutError):
            while part := await asyncio.wait_for(self._reader.read(1 << 16), max(end - time.monotonic(), 0)):
                found += part
                if until is not None and until in found:
                    break
        return found

    async def close(self) -> None:
        """Closes the connection at once."""
        self._writer.transport.abort()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
