"""Starts `widepack serve` as a process of its own, looks at it from outside, and talks to it over sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from asgi import Response

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Usage:
    """What a process uses. anon: bytes of its own memory (RssAnon)."""

    anon: int
    threads: int
    files: int


def usage(pid: int) -> Usage:
    """Returns what a process uses."""
    rows = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
    )
    files = len(os.listdir(f"/proc/{pid}/fd"))
    return Usage(int(rows["RssAnon"].split()[0]) * 1024, int(rows["Threads"]), files)


def running(pid: int) -> bool:
    """Returns whether a process exists and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children(pid: int) -> list[int]:
    """Returns the processes that a process has started and that still run."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == pid and fields[0] != "Z":
                found.append(int(name))
    return found


class ServerProcess:
    """`widepack serve` on a free port of this machine.

    Args:
        words: The artifacts and options of the command line.
        cache: The user's cache of the process; None for the usual one.

    Attributes:
        port: Where it listens.
        grpc_port: Where it listens for gRPC; 0 without `--grpc-port`.
        pid: Of the process.
    """

    def __init__(self, words: Sequence[str], cache: Path | None = None) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  `close` closes it
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        if cache is not None:
            env["XDG_CACHE_HOME"] = str(cache)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "widepack_cli", "serve", "--port", "0", *words], stderr=self._log, env=env
        )
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

    def usage(self) -> Usage:
        """Returns what the server uses."""
        return usage(self.pid)

    def send(self, sig: signal.Signals) -> None:
        """Sends a signal to the server."""
        self.process.send_signal(sig)

    def close(self) -> None:
        """Ends the server, if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._log.close()


class Lost(Exception):
    """Raised if the server closes the connection before an answer is complete. began: whether it sent any of
    it.
    """

    def __init__(self, began: bool) -> None:
        super().__init__(began)
        self.began = began


class Connection:
    """One connection to a server, for requests one after the other."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    @property
    def open(self) -> bool:
        """Whether it is connected."""
        return self._streams is not None

    async def connect(self) -> None:
        """Connects. Raises: OSError."""
        self._streams = await asyncio.open_connection(HOST, self._port)

    async def write(self, data: bytes) -> None:
        """Sends bytes; connects first if it must. Raises: OSError."""
        if self._streams is None:
            await self.connect()
        assert self._streams is not None
        self._streams[1].write(data)
        await self._streams[1].drain()

    async def response(self, method: str = "POST") -> Response:
        """Reads an answer. method: of the request; HEAD has no body. Raises: Lost; OSError."""
        assert self._streams is not None
        reader = self._streams[0]
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError as e:
            await self.close()
            raise Lost(bool(e.partial)) from None
        lines = head.decode("latin-1").split("\r\n")
        rows = [line.partition(":") for line in lines[1:] if line]
        headers = {name.strip().lower(): value.strip() for name, _, value in rows}
        try:
            body = b"" if method == "HEAD" else await self._body(reader, headers)
        except asyncio.IncompleteReadError:
            await self.close()
            raise Lost(True) from None
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
