"""Measures what hostile clients cost an honest one: `widepack serve` on one core, all clients on another.

An honest client sends small requests one after the other, first alone, then beside each kind of hostile
client. A kind passes if the 99th percentile of the honest client is at most three times its value alone or
50 ms, whichever is larger, if each of its requests is answered, and if the memory of the server grows by at
most 200 MB above its limit for bodies.

Then members are swapped all the time while requests of 1 to 500 rows run: every answer must be of one version
of each member. Its members answer with their version.

    python scripts/stress/serve_load.py [--seconds 60] [--answers 500000] [--only TEXT]

With 60 seconds it takes about 30 minutes, and the swaps about 15 more. Rows are written as they are measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / place) for place in ("tests", "tests/helpers", "scripts/measure")]

import wire_models  # noqa: E402
from infer import binary_request, read  # noqa: E402
from loaded import saved  # noqa: E402
from runner import RowFile, file_of, parser, say  # noqa: E402
from serve_hostile import KINDS, prepare  # noqa: E402
from server_process import Connection, Lost, ServerProcess, asked, on_the_wire  # noqa: E402

MB = 1_000_000
BODIES = 4 * 64 * MB
MORE = 200 * MB
LARGEST_MS, TIMES = 50.0, 3.0
GAP_S = 0.002
MEMBERS, VERSIONS, ROWS, CONNECTIONS = 3, 10, 500, 6
SWAP_S = 0.02
TOKEN = "token-of-the-load-test"
ALONE = "none"  # the key of the row without hostile clients
ATTACKER = (sys.executable, __file__, "--attack")


class Versioned(torch.nn.Module):
    """A member that answers with its version."""

    def __init__(self) -> None:
        super().__init__()
        self.version = torch.nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :1] * 0 + self.version


class Honest:
    """A client that sends small requests one after the other, each on time."""

    def __init__(self, server: ServerProcess) -> None:
        self._connection = Connection(server.port)
        self._data = on_the_wire(binary_request("ens.fold0", {"x": torch.rand(2, 6)}))
        self.times: list[float] = []
        self.failed: list[str] = []

    async def run(self, seconds: float) -> None:
        """Sends requests for some time."""
        end = time.perf_counter() + seconds
        while (start := time.perf_counter()) < end:
            try:
                await self._connection.write(self._data)
                got = await asyncio.wait_for(self._connection.response(), 20)
                if got.status != 200:
                    self.failed.append(f"{got.status} {got.body[:100]!r}")
            except (Lost, OSError, asyncio.TimeoutError) as e:
                self.failed.append(repr(e)[:100])
                await self._connection.reset()
            self.times.append(time.perf_counter() - start)
            await asyncio.sleep(GAP_S)
        await self._connection.close()


async def measured(server: ServerProcess, kind: str, seconds: float) -> dict[str, Any]:
    """Returns what the honest client sees beside a kind of hostile clients; "" for none."""
    before = most = server.private_bytes()
    attacker = None
    if kind:
        words = [*ATTACKER, kind, str(server.port), str(server.grpc_port), str(seconds)]
        attacker = await asyncio.create_subprocess_exec(*words, stdout=subprocess.PIPE)
        assert attacker.stdout is not None
        await attacker.stdout.readline()  # it has made its requests
    honest = Honest(server)
    running = asyncio.ensure_future(honest.run(seconds))
    while not running.done():
        most = max(most, server.private_bytes())
        await asyncio.sleep(0.05)
    await running
    sent = 0
    if attacker is not None:
        out, _ = await attacker.communicate()
        sent = int(out.split()[-1]) if out.split() else 0
    return {
        "kind": kind or ALONE,
        "hostile_requests": sent,
        "requests": len(honest.times),
        "p50_ms": percentile(honest.times, 0.5),
        "p99_ms": percentile(honest.times, 0.99),
        "largest_ms": percentile(honest.times, 1.0),
        "failed": len(honest.failed),
        "failures": honest.failed[:3],
        "memory_rise_mb": round((most - before) / MB, 1),
    }


def percentile(times: Sequence[float], share: float) -> float:
    """Returns a percentile in milliseconds."""
    ordered = sorted(times)
    return round(1000 * ordered[min(int(share * len(ordered)), len(ordered) - 1)], 2) if ordered else 0.0


def hostile(folder: Path, kind: str, seconds: float, alone_ms: float) -> dict[str, Any]:
    """Measures a kind beside a server of its own. alone_ms: p99 of the honest client alone."""
    server = ServerProcess([f"ens={folder / 'plain.wide'}", "--grpc-port", "0", "--threads", "1"])
    pin(server.pid, 0)
    try:
        asyncio.run(measured(server, "", 1.0))
        row = asyncio.run(measured(server, kind, seconds))
        row["limit_ms"] = round(max(TIMES * (alone_ms or row["p99_ms"]), LARGEST_MS), 2)
        row["limit_mb"] = (BODIES + MORE) / MB
        row["passed"] = (
            row["p99_ms"] <= row["limit_ms"]
            and row["memory_rise_mb"] <= row["limit_mb"]
            and not row["failed"]
            and "Traceback" not in server.log()
            and server.process.poll() is None
        )
    finally:
        server.close()
    return row if row["passed"] else {**row, "error": "it costs an honest client too much"}


class Swaps:
    """Requests of 1 to 500 rows while members are swapped."""

    def __init__(self, server: ServerProcess, answers: int) -> None:
        self._server, self._most = server, answers
        self.answers = self.swaps = self.divided = 0
        self.mixed: list[str] = []
        self._draw = random.Random(3)

    async def run(self) -> None:
        """Runs until there are as many answers."""
        swapping = asyncio.ensure_future(self._swap())
        await asyncio.gather(*(self._client(k) for k in range(CONNECTIONS)))
        swapping.cancel()

    async def _client(self, seed: int) -> None:
        draw, connection = random.Random(seed), Connection(self._server.port)
        made = [self._request(draw) for _ in range(60)]
        while self.answers < self._most:
            rows, data = draw.choice(made)
            await connection.write(data)
            got = await connection.response()
            if got.status != 200:
                self.mixed.append(f"status {got.status} {got.body[:200]!r}")
                return
            y = read(got).outputs["output"].reshape(-1, rows, 3)
            self.answers += 1
            self.divided += rows > 64
            if not bool((y == y[:, :1]).all()):
                self.mixed.append(
                    f"an answer of {rows} rows has the versions {sorted(set(y.flatten().tolist()))}"
                )
        await connection.close()

    def _request(self, draw: random.Random) -> tuple[int, bytes]:
        rows = draw.choice([draw.randint(1, 64), draw.randint(65, ROWS)])
        x, kind = torch.rand(rows, 6), draw.choice(["all", "one", "routed"])
        if kind == "routed":
            given = {"x": x, "member": torch.full((rows,), draw.randrange(MEMBERS))}
            return rows, on_the_wire(binary_request("ens", given))
        name = "ens" if kind == "all" else f"ens.{draw.randrange(MEMBERS)}"
        return rows, on_the_wire(binary_request(name, {"x": x}))

    async def _swap(self) -> None:
        connection = Connection(self._server.port)
        while True:
            member, number = self._draw.randrange(MEMBERS), self._draw.randrange(VERSIONS)
            body = {"parameters": {"checkpoint": f"v{number}.pt"}}
            got = await asked(connection, "POST", f"/v2/repository/models/ens.{member}/load", body, TOKEN)
            if got.status != 200:
                self.mixed.append(f"a swap got {got.status} {got.body[:200]!r}")
                return
            self.swaps += 1
            await asyncio.sleep(SWAP_S)


def swapped(folder: Path, answers: int) -> dict[str, Any]:
    """Runs requests while members are swapped."""
    (folder / "versions").mkdir()
    (folder / "e").mkdir()
    (folder / "token").write_text(TOKEN)
    saved(Versioned, folder / "e", "x=float32[B,6]", members=MEMBERS)
    for number in range(VERSIONS):
        state = {"version": torch.full((3,), float(number))}
        torch.save(state, folder / "versions" / f"v{number}.pt")
    words = [f"ens={folder / 'e' / 'e.wide'}", "--swap-from", str(folder / "versions"), "--threads", "1"]
    server = ServerProcess([*words, "--admin-token-file", str(folder / "token")])
    pin(server.pid, 0)
    try:
        run, start = Swaps(server, answers), time.perf_counter()
        asyncio.run(run.run())
    finally:
        server.close()
    return {
        "answers": run.answers,
        "of_several_batches": run.divided,
        "swaps": run.swaps,
        "seconds": round(time.perf_counter() - start, 1),
        "mixed": len(run.mixed),
        **({"error": "; ".join(run.mixed[:3])} if run.mixed else {}),
    }


def pin(pid: int, place: int) -> None:
    """Runs a process and its threads on one of the cores of this process."""
    cores = sorted(os.sched_getaffinity(0) if place else ALL)
    for task in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(task), {cores[place % len(cores)]})


ALL = os.sched_getaffinity(0)


def measure(file: RowFile, folder: Path, given: argparse.Namespace) -> None:
    """Measures what the document lacks, and writes each row when it is known."""
    kinds = ["", *(kind for kind in KINDS if given.only in kind)] if given.seconds else []
    for kind in kinds:
        if file.must_run(kind or ALONE):
            alone = file.rows[ALONE]["p99_ms"] if kind else 0.0
            file.add(kind or ALONE, hostile(folder, kind, given.seconds, alone))
            say(json.dumps(file.rows[kind or ALONE]))
    if given.answers and file.must_run("swaps"):
        file.add("swaps", swapped(folder, given.answers))
        say(json.dumps(file.rows["swaps"]))


def main() -> int:
    if sys.argv[1:2] == ["--attack"]:
        kind, http, grpc, seconds = sys.argv[2:]
        prepare(kind)
        print("ready", flush=True)
        print(asyncio.run(KINDS[kind](int(http), int(grpc), float(seconds))))
        return 0
    options = parser(__doc__, "serve-load.json")
    options.add_argument("--seconds", type=float, default=60.0, help="of each kind; 0 for none")
    options.add_argument("--answers", type=int, default=500_000, help="while members are swapped; 0 for none")
    given = options.parse_args()
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {max(ALL)})
    file = file_of(given)
    with tempfile.TemporaryDirectory() as name:
        os.environ["XDG_CACHE_HOME"] = f"{name}/cache"
        wire_models.built("plain", Path(name))
        measure(file, Path(name), given)
    wrong = {key: row["error"] for key, row in file.rows.items() if "error" in row}
    print(f"wrong: {json.dumps(wrong)}" if wrong else "nothing is wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
