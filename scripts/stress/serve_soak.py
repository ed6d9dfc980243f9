#!/usr/bin/env python3
"""Loads `widepack serve` for minutes while members are swapped and artifacts are published, then ends it
under load many times.

32 connections send requests to all members, to one, and to one for each row. Every two seconds a member is
swapped, every minute another artifact is published at the path. One request in a hundred is dropped by the
client, and one in a hundred has a bad body. Every answer must be that of exactly one version of each of its
members, within bounds. After a swap, the next answer of the member is that of the new version.

Then a server under load gets SIGTERM, with one process and with two: every request that was sent gets an
answer, `/v2/health/ready` is 503 within 0.1 seconds, and the server ends with exit code 0.

    python scripts/stress/serve_soak.py [--minutes 10] [--terms 20]

With 0 for one of the two, what an earlier run has written of it stays.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import widepack
from widepack_bench.report.environment import environment

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "helpers")]

import wire_models  # noqa: E402
from infer import binary_request, read  # noqa: E402
from serve_client import (  # noqa: E402
    MEMBERS,
    VERSIONS,
    Client,
    Counts,
    Truth,
    asked,
    percentile,
    write_versions,
)
from serve_requests import on_the_wire  # noqa: E402
from serve_terms import Ends  # noqa: E402
from server_process import Connection, ServerProcess, Usage  # noqa: E402

CONNECTIONS = 32
SWAP_S = 2.0
PUBLISH_S = 60.0
SETTLED_S = 8.0
"""Seconds after a publication in which its artifact, or the one before with its swaps, may answer."""
SAMPLE_S = 5.0
BASE_S = 20.0
TOKEN = "token-of-the-soak-test"


class Soak:
    """One run. path: the artifact. versions: the folder of checkpoints."""

    def __init__(self, path: Path, versions: Path, server: ServerProcess, minutes: float) -> None:
        self.path, self.versions, self.server = path, versions, server
        self.seconds = 60 * minutes
        self.truth, self.counts = Truth(), Counts()
        self.swaps = self.checked_swaps = self.published = 0
        self.samples: list[tuple[float, Usage]] = []
        self._draw = random.Random(1)
        self._published_at = -SETTLED_S
        self._ended = asyncio.Event()
        self._began = time.perf_counter()

    async def run(self) -> None:
        """Runs the load, first without changes, then with them."""
        clients = [Client(self.server.port, self.truth, self.counts, 100 + i) for i in range(CONNECTIONS)]
        running = [asyncio.ensure_future(c.run(self._ended)) for c in clients]
        await asyncio.sleep(BASE_S)
        changes = [asyncio.ensure_future(f()) for f in (self._swap, self._publish, self._sample)]
        await asyncio.sleep(self.seconds)
        self._ended.set()
        await asyncio.gather(*running)
        for change in changes:
            change.cancel()
        await asyncio.gather(*changes, return_exceptions=True)
        for change in changes:
            if not change.cancelled() and (e := change.exception()) is not None:
                self.counts.refuse(f"a change failed: {e!r}")

    async def _swap(self) -> None:
        while True:
            await asyncio.sleep(SWAP_S)
            connection = Connection(self.server.port)  # the server closes connections that are idle for long
            member, number = self._draw.randrange(MEMBERS), self._draw.randrange(VERSIONS)
            name, body = f"ens.fold{member}", {"parameters": {"checkpoint": f"m{member}v{number}.pt"}}
            start = time.perf_counter()
            got = await asked(connection, "POST", f"/v2/repository/models/{name}/load", body, TOKEN)
            if got.status != 200:
                self.counts.refuse(f"a swap got {got.status} {got.body[:300]!r}")
                await connection.close()
                continue
            self.swaps += 1
            x = self.truth.inputs[0]
            await connection.write(on_the_wire(binary_request(name, {"x": x})))
            y = read(await connection.response()).outputs["output"]
            found = self.truth.versions(0, slice(None), member, y)
            if start - self._published_at > SETTLED_S and time.perf_counter() > self._published_at:
                self.checked_swaps += 1
                if found != [number]:
                    self.counts.refuse(f"after the swap to version {number} member {member} is {found}")
            await connection.close()

    async def _publish(self) -> None:
        while True:
            await asyncio.sleep(PUBLISH_S)
            members: dict[int | str, str | Path] = {
                m: self.versions / f"m{m}v{self._draw.randrange(VERSIONS)}.pt" for m in (0, 2)
            }
            self._published_at = time.perf_counter() + 1e6  # until it is done
            await asyncio.to_thread(widepack.update, self.path, members)
            self._published_at = time.perf_counter()
            self.published += 1
            print(f"{self.published} published; {self.counts.answers} answers", flush=True)

    async def _sample(self) -> None:
        while True:
            self.samples.append((time.perf_counter() - self._began, self.server.usage()))
            await asyncio.sleep(SAMPLE_S)

    def document(self) -> dict[str, Any]:
        """Returns what was seen."""
        counts = self.counts
        late = [s for s in self.samples if s[0] >= min(120.0, self.seconds / 2)]
        changed_from = self._began + BASE_S
        before = [s for s, at in counts.times if at < changed_from]
        after = [s for s, at in counts.times if at >= changed_from]
        return {
            "minutes": round(self.seconds / 60, 1),
            "connections": CONNECTIONS,
            "answers": counts.answers,
            "rows": counts.rows,
            "statuses": {str(k): v for k, v in sorted(counts.statuses.items())},
            "dropped_by_clients": counts.dropped,
            "bad_requests": counts.bad,
            "swaps": self.swaps,
            "swaps_seen_by_the_next_answer": self.checked_swaps,
            "published": self.published,
            "versions_that_answered": len(counts.versions),
            "p50_ms": percentile(after, 0.5),
            "p99_ms": percentile(after, 0.99),
            "p99_ms_without_changes": percentile(before, 0.99),
            "largest_ms": percentile(after, 1.0),
            "anon_mb_per_minute": round(slope([(t, u.anon / 1e6) for t, u in late]) * 60, 3),
            "anon_mb": [round(u.anon / 1e6, 1) for u in (late[0][1], late[-1][1])],
            "threads": sorted({u.threads for _, u in late}),
            "files": [min(u.files for _, u in late), max(u.files for _, u in late)],
            "files_slope_per_minute": round(slope([(t, u.files) for t, u in late]) * 60, 3),
            "wrong": counts.wrong,
        }


def slope(points: list[tuple[float, float]]) -> float:
    """Returns the slope of the line through points with the least squares."""
    count = len(points)
    if count < 2:
        return 0.0
    t0 = sum(t for t, _ in points) / count
    y0 = sum(y for _, y in points) / count
    return sum((t - t0) * (y - y0) for t, y in points) / sum((t - t0) ** 2 for t, _ in points)


def soak(folder: Path, minutes: float) -> dict[str, Any]:
    """Runs the load with swaps and publications."""
    (folder / "token").write_text(TOKEN)
    path, versions = folder / "artifacts" / "plain.wide", folder / "versions"
    words = [f"ens={path}", "--reload", "2s", "--swap-from", str(versions)]
    server = ServerProcess([*words, "--admin-token-file", str(folder / "token")])
    try:
        run = Soak(path, versions, server, minutes)
        asyncio.run(run.run())
        document = run.document()
        if "Traceback" in (log := server.log()):
            document["wrong"].append(f"the log has a traceback: {log[log.find('Traceback') :][:600]}")
        log_lines = [line for line in log.splitlines() if " ERROR " in line]
        document["errors_in_the_log"] = len(log_lines)
        if server.process.poll() is not None:
            document["wrong"].append("the server ended")
        return document
    finally:
        server.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--terms", type=int, default=20)
    parser.add_argument("-o", "--out", type=Path, default=ROOT / "bench/results/serve-soak.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        (folder / "artifacts").mkdir()
        path = wire_models.built("plain", folder / "artifacts")
        write_versions(folder / "versions")
        document: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
        document |= {
            "what": " ".join((__doc__ or "").split("\n\n    python")[0].split()),
            "environment": environment("cpu", 1),
        }
        document["sigterm"] = {
            f"{workers} {'process' if workers == 1 else 'processes'}": Ends(path, workers).run(options.terms)
            for workers in (1, 2)
            if options.terms
        } or document.get("sigterm", {})
        if options.minutes:
            document["soak"] = soak(folder, options.minutes)
    ends = document["sigterm"].values()
    wrong = [*document.get("soak", {}).get("wrong", []), *(w for e in ends for w in e["wrong"])]
    document["wrong"] = len(wrong)
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({k: v for k, v in document.items() if k != "environment"}, indent=1)[:6000])
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
