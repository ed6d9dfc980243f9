"""Ends a server under load by SIGTERM, many times: every request gets an answer, and no process is left."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from pathlib import Path
from typing import Any

from serve_client import Client, Counts, Truth, asked
from server_process import Connection, Lost, ServerProcess, children, running

CLIENTS = 12
DRAIN_S = 1.0
MORE_S = 5.0
READY_S = 0.1
POLL_S = 0.01


class Ends:
    """Runs of one server after the other.

    Args:
        path: Of the artifact.
        workers: The processes of the server.
    """

    def __init__(self, path: Path, workers: int) -> None:
        self._path, self._workers = path, workers
        self._truth = Truth()
        self._counts = Counts()
        self._lost: list[dict[str, Any]] = []
        self._refused = 0
        self._ready_ms: list[float] = []
        self._ended_s: list[float] = []
        self._answers_after = 0

    def run(self, times: int) -> dict[str, Any]:
        """Ends a server some times. Returns: what was seen."""
        for number in range(times):
            asyncio.run(self._once(number))
        counts = self._counts
        return {
            "times": times,
            "clients": CLIENTS,
            "drain_s": DRAIN_S,
            "answers": counts.answers,
            "answers_after_sigterm": self._answers_after,
            "requests_without_answer": len(self._lost),
            "connections_refused_at_the_end": self._refused,
            "not_ready_after_ms": [round(f(self._ready_ms), 1) for f in (min, max)],
            "ended_after_s": [round(f(self._ended_s), 2) for f in (min, max)],
            "lost": self._lost[:10],
            "wrong": counts.wrong,
        }

    async def _once(self, number: int) -> None:
        words = [f"ens={self._path}", "--drain", f"{DRAIN_S}s"]
        more = ["--workers", str(self._workers)] if self._workers > 1 else []
        server = ServerProcess([*words, *more])
        try:
            await self._until_ready(server.port)
            pids = [server.pid, *children(server.pid)]
            ended = asyncio.Event()
            running_clients = [
                asyncio.ensure_future(self._client(server, 1000 * number + i, ended)) for i in range(CLIENTS)
            ]
            await asyncio.sleep(0.5 + random.Random(number).random())
            before, start = self._counts.answers, time.perf_counter()
            server.send(signal.SIGTERM)
            polls = asyncio.ensure_future(self._poll(server.port, start))
            while server.process.poll() is None and time.perf_counter() - start < DRAIN_S + 4 * MORE_S:
                await asyncio.sleep(0.02)
            seconds = time.perf_counter() - start
            ended.set()
            await asyncio.gather(*running_clients)
            await polls
            self._answers_after += self._counts.answers - before
            self._ended_s.append(seconds)
            code = server.process.poll()
            if code != 0:
                self._counts.refuse(f"run {number}: exit code {code}\n{server.log()[-400:]}")
            if seconds > DRAIN_S + MORE_S:
                self._counts.refuse(f"run {number}: it ended after {seconds:.1f} s")
            if left := [pid for pid in pids if running(pid)]:
                self._counts.refuse(f"run {number}: the processes {left} are left")
            if "Traceback" in server.log():
                self._counts.refuse(f"run {number}: the log has a traceback\n{server.log()[-600:]}")
        finally:
            server.close()

    async def _until_ready(self, port: int) -> None:
        for _ in range(self._workers * 8):
            connection = Connection(port)
            got = await asyncio.wait_for(asked(connection, "GET", "/v2/health/ready"), 60)
            assert got.status == 200, got
            await connection.close()
            await asyncio.sleep(0.05)

    async def _poll(self, port: int, start: float) -> None:
        """Asks whether the server is ready, each time on a new connection, until it refuses them."""
        last_ready = 0.0
        while True:
            connection, at = Connection(port), time.perf_counter() - start
            try:
                got = await asked(connection, "GET", "/v2/health/ready")
            except (Lost, OSError):
                break
            finally:
                await connection.close()
            if got.status == 200:
                last_ready = at
            await asyncio.sleep(POLL_S)
        self._ready_ms.append(1000 * last_ready)
        if last_ready > READY_S:
            self._counts.refuse(f"the server was ready {last_ready:.3f} s after SIGTERM")

    async def _client(self, server: ServerProcess, seed: int, ended: asyncio.Event) -> None:
        """Sends requests until the server refuses connections."""
        client = Client(server.port, self._truth, self._counts, seed, losses=0.0)
        while not ended.is_set():
            if not client.connection.open:
                try:
                    await client.connection.connect()
                except OSError:
                    self._refused += 1
                    return
            start = time.perf_counter()
            try:
                await client.step()
            except (Lost, OSError) as e:
                self._lost.append(
                    {"seed": seed, "why": repr(e)[:100], "after_s": time.perf_counter() - start}
                )
                self._counts.refuse(f"client {seed}: a request got no answer: {e!r}")
                await client.connection.reset()
        await client.connection.close()
