"""A gRPC client that sends calls and never reads an answer, on a plain socket."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 4, 6, 8
END_STREAM, END_HEADERS, ACK = 1, 4, 1
INITIAL_WINDOW, LARGEST_WINDOW = 4, (1 << 31) - 1
PART = 16384


class StoppedClient:
    """One HTTP/2 connection (RFC 9113) to a server of gRPC, for a `with` block.

    A process that is stopped by a signal may have sent nothing yet, or have read everything. This client
    holds the last byte of each call back until it stops to read, so that no answer is ever read.

    Args:
        address: `host:port` of the server.
    """

    def __init__(self, address: str) -> None:
        host, port = address.split(":")
        self._socket = socket.create_connection((host, int(port)), timeout=60)
        self._stream_window, self._windows = 65535, {0: 65535}
        window = struct.pack(">HI", INITIAL_WINDOW, LARGEST_WINDOW)
        self._socket.sendall(PREFACE + _frame(SETTINGS, 0, 0, window))
        self._socket.sendall(_frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 1 << 30)))

    def __enter__(self) -> StoppedClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, method: str, messages: Sequence[bytes]) -> None:
        """Sends a call for each message. All of them end after the last byte that is read."""
        calls = {1 + 2 * k: struct.pack(">BI", 0, len(m)) + m for k, m in enumerate(messages)}
        head = _headers({":method": "POST", ":scheme": "http", ":path": method, ":authority": "a",
                         "te": "trailers", "content-type": "application/grpc"})  # fmt: skip  # pairs
        for stream, body in calls.items():
            self._windows[stream] = self._stream_window
            self._socket.sendall(_frame(HEADERS, END_HEADERS, stream, head))
            for k in range(0, len(body) - 1, PART):
                part = body[k : min(k + PART, len(body) - 1)]
                while min(self._windows[stream], self._windows[0] - len(calls)) < len(part) + 1:
                    self._read()
                self._windows[stream] -= len(part)
                self._windows[0] -= len(part)
                self._socket.sendall(_frame(DATA, 0, stream, part))
        for stream, body in calls.items():
            self._socket.sendall(_frame(DATA, END_STREAM, stream, body[-1:]))

    def _read(self) -> None:
        """Reads one frame, for the windows of what may be sent."""
        length, kind, flags, stream = struct.unpack(">IBBI", b"\0" + self._exactly(9))
        payload = self._exactly(length)
        if kind == WINDOW_UPDATE:
            self._windows[stream] = self._windows.get(stream, 0) + struct.unpack(">I", payload)[0]
        elif kind == PING and not flags & ACK:
            self._socket.sendall(_frame(PING, ACK, 0, payload))
        elif kind == SETTINGS and not flags & ACK:
            for k in range(0, length, 6):
                name, value = struct.unpack(">HI", payload[k : k + 6])
                if name == INITIAL_WINDOW:
                    for known in self._windows.keys() - {0}:
                        self._windows[known] += value - self._stream_window
                    self._stream_window = value
            self._socket.sendall(_frame(SETTINGS, ACK, 0, b""))
        elif kind not in (SETTINGS, PING):
            raise ConnectionError(f"the server sent a frame of type {kind} before a call had ended")

    def _exactly(self, size: int) -> bytes:
        found = b""
        while len(found) < size:
            part = self._socket.recv(size - len(found))
            if not part:
                raise ConnectionError("the server closed the connection")
            found += part
        return found


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _headers(fields: dict[str, str]) -> bytes:
    """Returns fields as HPACK literals without indexing (RFC 7541, 6.2.2). Each is shorter than 127 bytes."""
    return b"".join(
        bytes([0, len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in fields.items()
    )
