"""Starts `widepack serve` as a process of its own, looks at it from outside, and talks to it over sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
from asgi import Request, Response

HOST = "127.0.0.1"


def on_the_wire(request: Request) -> bytes:
    """Returns a request of one body as HTTP/1.1."""
    body = request.body if isinstance(request.body, bytes) else b"".join(request.body)
    headers = {"Host": "localhost", **request.headers, "content-length": str(len(body))}
    lines = [f"{request.method} {request.path} HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items())]
    return "\r\n".join(lines).encode("utf-8", "replace") + b"\r\n\r\n" + body


async def asked(
    connection: Connection, method: str, path: str, body: Any = None, token: str = ""
) -> Response:
    """Sends a request with a JSON body. Raises: Lost; OSError."""
    headers = {"authorization": f"Bearer {token}"} if token else {}
    await connection.write(on_the_wire(Request(method, path, orjson.dumps(body), headers)))
    return await connection.response(method)


class ServerProcess:
    """`widepack serve` on a free port of this machine.

    Args:
        words: The artifacts and options of the command line.

    Attributes:
        port: Where it listens.
        grpc_port: Where it listens for gRPC; 0 without `--grpc-port`.
        pid: Of the process.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  `close` closes it
        command = [sys.executable, "-m", "widepack_cli", "serve", "--port", "0", *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stderr=self._log, env=environment)
        self.pid = self.process.pid
        self.grpc_port = 0
        self.port = self._listening_port()

    def _listening_port(self) -> int:
        """Returns the port from the line that the server writes when it listens. Raises: SystemExit."""
        limit = time.monotonic() + 120
        while time.monotonic() < limit and self.process.poll() is None:
            for line in self.log().splitlines():
                if line.startswith("serving ") and "http://" in line:
                    if " and gRPC on " in line:
                        address = line.partition(" and gRPC on ")[2].partition(";")[0]
                        self.grpc_port = int(address.rpartition(":")[2])
                    return int(line.partition("http://")[2].partition(";")[0].split()[0].rpartition(":")[2])
            time.sleep(0.05)
        raise SystemExit(f"the server did not start:\n{self.log()}")

    def log(self) -> str:
        """Returns what the server wrote to standard error."""
        self._log.seek(0)
        return self._log.read()

    def private_bytes(self) -> int:
        """Returns the bytes of the server's own memory (RssAnon)."""
        text = Path(f"/proc/{self.pid}/status").read_text()
        return 1024 * int(text.partition("RssAnon:")[2].split()[0])

    def close(self) -> None:
        """Ends the server, if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._log.close()


class Lost(Exception):
    """Raised if the server closes the connection before an answer is complete."""


class Connection:
    """One connection to a server, for requests one after the other."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def write(self, data: bytes) -> None:
        """Sends bytes; connects first if it must. Raises: OSError."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(HOST, self._port)
        self._streams[1].write(data)
        await self._streams[1].drain()

    async def response(self, method: str = "POST") -> Response:
        """Reads an answer. method: of the request; HEAD has no body. Raises: Lost; OSError."""
        assert self._streams is not None
        reader = self._streams[0]
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            lines = head.decode("latin-1").split("\r\n")
            rows = [line.partition(":") for line in lines[1:] if line]
            headers = {name.strip().lower(): value.strip() for name, _, value in rows}
            body = b"" if method == "HEAD" else await self._body(reader, headers)
        except asyncio.IncompleteReadError as e:
            await self.close()
            raise Lost(str(e)) from None
        if headers.get("connection", "").lower() == "close":
            await self.close()
        return Response(int(lines[0].split()[1]), headers, body)

    @staticmethod
    async def _body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> bytes:
        if headers.get("transfer-encoding") != "chunked":
            return await reader.readexactly(int(headers.get("content-length", "0")))
        parts = []
        while size := int(await reader.readuntil(b"\r\n"), 16):
            parts.append(await reader.readexactly(size))
            await reader.readexactly(2)
        await reader.readexactly(2)
        return b"".join(parts)

    async def close(self) -> None:
        """Closes the connection."""
        if self._streams is not None:
            _, writer = self._streams
            self._streams = None
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def reset(self) -> None:
        """Closes the connection at once, as a client that dies."""
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None
