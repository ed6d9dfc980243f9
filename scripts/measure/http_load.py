"""Sends requests to a server on this machine over some connections, each a new one when its answer came.

    python scripts/measure/http_load.py DOCUMENT

`serve.py` starts it as a process of its own, so that its time is not the server's. DOCUMENT is JSON: `port`,
`connections`, `seconds`, `warm` (seconds before counting), `pids` (of the server), `requests` (a file with a
list of [path, headers, body in base64]). It prints one JSON document: requests a second, percentiles of the
time of a request, the server's CPU time of a request, its memory, and how many answers were not 200.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

TICKS = os.sysconf("SC_CLK_TCK")


def encoded(path: str, headers: dict[str, str], body: bytes) -> bytes:
    """Returns a whole HTTP request."""
    lines = "".join(f"{k}: {v}\r\n" for k, v in headers.items())
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{lines}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def family(pids: Iterable[int]) -> list[int]:
    """Returns processes and their descendants."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        if fields := read(int(name), "stat").rpartition(")")[2].split():
            children.setdefault(int(fields[1]), []).append(int(name))
    found, todo = [], list(pids)
    while todo:
        found.append(todo.pop())
        todo += children.get(found[-1], [])
    return found


def read(pid: int, name: str) -> str:
    """Returns a file of a process; empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except OSError:
        return ""


def cpu_seconds(pids: Iterable[int]) -> float:
    """Returns the CPU time of processes, in user and system mode."""
    fields = (read(pid, "stat").rpartition(")")[2].split() for pid in pids)
    return sum(int(f[11]) + int(f[12]) for f in fields if f) / TICKS


def memory_bytes(pids: Iterable[int]) -> int:
    """Returns the proportional memory of processes."""
    texts = (read(pid, "smaps_rollup") for pid in pids)
    return 1024 * sum(int(text.partition("\nPss:")[2].split()[0]) for text in texts if text)


class Load:
    """A closed loop of requests."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.port, self.connections = document["port"], document["connections"]
        self.pids = family(document["pids"])
        rows = json.loads(Path(document["requests"]).read_text())
        self.requests = [encoded(path, headers, base64.b64decode(body)) for path, headers, body in rows]
        now = time.perf_counter()
        self.begin = now + document["warm"]
        self.end = self.begin + document["seconds"]
        self.times: list[float] = []
        self.wrong = 0
        self.first_wrong = ""

    async def connection(self, number: int) -> None:
        """Sends requests over one connection until the end."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        k = number
        while time.perf_counter() < self.end:
            start = time.perf_counter()
            writer.write(self.requests[k % len(self.requests)])
            k += 7
            head = await reader.readuntil(b"\r\n\r\n")
            lines = head.lower().split(b"\r\n")
            length = next(int(line[15:]) for line in lines if line.startswith(b"content-length:"))
            body = await reader.readexactly(length)
            if not head.startswith(b"HTTP/1.1 200"):
                self.wrong += 1
                self.first_wrong = self.first_wrong or f"{head[:40]!r} {body[:200]!r}"
            if start >= self.begin:
                self.times.append(time.perf_counter() - start)
        writer.close()

    async def count_cpu(self) -> tuple[float, float]:
        """Returns the server's CPU seconds, and the seconds in which it used them."""
        await asyncio.sleep(self.begin - time.perf_counter())
        before, start = cpu_seconds(self.pids), time.perf_counter()
        await asyncio.sleep(self.end - time.perf_counter() - 0.02)
        return cpu_seconds(self.pids) - before, time.perf_counter() - start

    async def run(self) -> dict[str, Any]:
        """Runs the load, and returns what was measured."""
        counting = asyncio.create_task(self.count_cpu())
        await asyncio.gather(*(self.connection(i) for i in range(self.connections)))
        cpu, seconds = await counting
        times = sorted(self.times)
        count = len(times)
        whole = self.end - self.begin
        return {
            "requests_per_s": round(count / whole, 1),
            "p50_ms": round(1000 * times[count // 2], 3),
            "p99_ms": round(1000 * times[min(count - 1, int(0.99 * count))], 3),
            "cpu_us": round(1e6 * cpu / (count * seconds / whole), 1),
            "memory_mb": round(memory_bytes(self.pids) / 1e6),
            "wrong": self.wrong,
            "first_wrong": self.first_wrong,
        }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(Load(json.loads(sys.argv[1])).run())))
