#!/usr/bin/env python3
"""Measures what `widepack serve` adds to a call, how it starts, and how it behaves beyond its capacity.

    python scripts/measure/serve_limits.py [-o bench/results/serve-limits-cpu.json] [--seconds 4] [--part
    NAME]

| part | what is measured |
|---|---|
| `protocol` | CPU time of a request beyond the call in process: one row of 64 in JSON and binary, an image |
| `latency` | the median time of a request on one connection, beside the call in process |
| `ensemble` | mean and deviation of 100 members for one row, beside a loop over modules |
| `start` | seconds until the server is ready, beside `widepack.load`; seconds of the imports |
| `flood` | p99 of eight members at 20 requests a second, alone, and while another sends 64 rows ten times
over |
| `overload` | three times as many requests as the server can answer: which status, how fast, what remains |

The network is the MLP of 100 members of `route_networks.py`; the image goes to members that read ten numbers.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import orjson
import torch
from http_load import encoded
from route_networks import NETWORKS
from serve_processes import ENVIRONMENT, built, requests, running
from torch import Tensor, nn

import widepack
from serve import load
from widepack_bench.report.environment import environment

ROOT = Path(__file__).resolve().parents[2]
MLP = "MLP 64-128-64"
TENANTS, RATE = 8, 20
FLOODING, FLOOD_ROWS = 10, 64


class Slice(nn.Module):
    """Reads ten numbers of an image, so that nearly all time is the protocol's."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(10))

    def forward(self, input: Tensor) -> Tensor:
        return input[:, 0, 0, :10] * self.scale


def _median_call_us(call: Callable[[], Any], count: int = 500) -> tuple[float, float]:
    """Returns the microseconds of a call: of the clock, and of the CPU."""
    for _ in range(50):
        call()
    times, before = [], time.process_time()
    for _ in range(count):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e6 * median(times), 1e6 * (time.process_time() - before) / count


def protocol(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measures the CPU time of requests beyond that of the calls."""
    ens = widepack.load(folder / "ens.wide", threads=1)
    x = torch.randn(1, 64)
    _, alone = _median_call_us(lambda: ens.route(x, member=[3]))
    found: dict[str, Any] = {"call_cpu_us": round(alone, 1)}
    for form in ("json", "binary"):
        requests(MLP, "uniform", form, folder / "r.json")
        with running("serve", MLP, folder, {}) as (port, pids):
            done = load(port, pids, folder / "r.json", options.seconds, 32)
        found[f"row_{form}_cpu_us"] = done["cpu_us"]
        found[f"row_{form}_requests_per_s"] = done["requests_per_s"]
    found["image_binary_cpu_us"] = _image(folder, options)
    return found


def _image(folder: Path, options: argparse.Namespace) -> float:
    """Returns the CPU time of a request with an image of 3x224x224 in binary form."""
    inner = folder / "image"
    inner.mkdir()
    files = []
    for i in range(4):
        files.append(inner / f"m{i}.pt")
        torch.save(Slice().state_dict(), files[-1])
    widepack.build(files, inner / "ens.wide", model=Slice, inputs=["input=float32[B,3,224,224]"], pt2=False)
    data = torch.randn(1, 3, 224, 224).numpy().tobytes()
    size = {"binary_data_size": len(data)}
    one = {"name": "input", "datatype": "FP32", "shape": [1, 3, 224, 224], "parameters": size}
    head = orjson.dumps({"inputs": [one], "parameters": {"binary_data_output": True}})
    headers = {"Inference-Header-Content-Length": str(len(head))}
    rows = [[f"/v2/models/ens.{i}/infer", headers, base64.b64encode(head + data).decode()] for i in range(4)]
    (inner / "r.json").write_text(json.dumps(rows))
    with running("serve", MLP, inner, {}) as (port, pids):
        found: float = load(port, pids, inner / "r.json", options.seconds, 8)["cpu_us"]
    return found


def latency(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measures one connection, on the thread of the loop and on the thread of the batches."""
    ens = widepack.load(folder / "ens.wide", threads=1)
    x = torch.randn(1, 64)
    clock, _ = _median_call_us(lambda: ens.route(x, member=[3]))
    found: dict[str, Any] = {"call_us": round(clock, 1)}
    requests(MLP, "uniform", "binary", folder / "r.json")
    for name, more in (("inline", ()), ("thread", ("--inline", "0"))):
        with running("serve", MLP, folder, {}, more) as (port, pids):
            done = load(port, pids, folder / "r.json", options.seconds, 1)
        found[f"{name}_p50_ms"] = done["p50_ms"]
        found[f"{name}_beyond_ms"] = round(done["p50_ms"] - clock / 1000, 3)
    return found


def ensemble(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measures requests for figures of all members, over eight connections."""
    requests(MLP, "uniform", "binary", folder / "r.json")
    rows = json.loads((folder / "r.json").read_text())
    (folder / "r.json").write_text(json.dumps([["/v2/models/ens/infer", *rest] for _, *rest in rows]))
    found: dict[str, list[dict[str, Any]]] = {"serve": [], "dict": []}
    for _ in range(3):
        for kind, results in found.items():
            with running(kind, MLP, folder, {}, ("--outputs", "output.mean,output.std")) as (port, pids):
                results.append(load(port, pids, folder / "r.json", options.seconds, 8))
    per_s, cpu = (
        {kind: median(r[key] for r in results) for kind, results in found.items()}
        for key in ("requests_per_s", "cpu_us")
    )
    return {
        "requests_per_s": per_s,
        "cpu_us": cpu,
        "requests_ratio": round(per_s["serve"] / per_s["dict"], 2),
        "cpu_ratio": round(cpu["serve"] / cpu["dict"], 3),
    }


def start(folder: Path, _: argparse.Namespace) -> dict[str, Any]:
    """Measures the start of a server."""
    widepack.load(folder / "ens.wide", threads=1)  # the probe's pass is stored

    def seconds(*words: str) -> float:
        begin = time.perf_counter()
        subprocess.run([sys.executable, *words], check=True, env=ENVIRONMENT, capture_output=True)
        return round(time.perf_counter() - begin, 3)

    loading = f"import widepack; widepack.load({str(folder / 'ens.wide')!r}, threads=1)"
    imports = "import uvicorn, starlette.applications, orjson, prometheus_client, httptools, uvloop"
    ready = []
    for _turn in range(3):
        begin = time.perf_counter()
        with running("serve", MLP, folder, {}):
            ready.append(time.perf_counter() - begin)
    empty = seconds("-c", "pass")
    return {
        "ready_s": round(median(ready), 3),
        "load_s": median(seconds("-c", loading) for _ in range(3)),
        "imports_s": round(median(seconds("-c", imports) for _ in range(3)) - empty, 3),
        "help_s": median(seconds("-m", "widepack_cli", "--help") for _ in range(3)),
    }


async def _request(port: int, data: bytes) -> tuple[int, dict[bytes, bytes]]:
    """Sends one request on a connection of its own. Returns: the status, and the headers."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    lines = [line.partition(b": ") for line in head.split(b"\r\n")[1:] if line]
    headers = {key: value for key, _, value in lines}
    await reader.readexactly(int(headers[b"content-length"]))
    writer.close()
    return int(head[9:12]), headers


def _rows(member: int, rows: int, shape: tuple[int, ...] = (64,)) -> bytes:
    """Returns a request with some rows for one member, in binary form."""
    x = torch.randn(rows, *shape)
    data = x.numpy().tobytes()
    one = {
        "name": "input",
        "datatype": "FP32",
        "shape": list(x.shape),
        "parameters": {"binary_data_size": len(data)},
    }
    head = orjson.dumps({"inputs": [one], "parameters": {"binary_data_output": True}})
    headers = {"Inference-Header-Content-Length": str(len(head))}
    return encoded(f"/v2/models/ens.{member}/infer", headers, head + data)


async def _steady(port: int, seconds: float, members: range) -> list[float]:
    """Sends requests of members at a fixed rate. Returns: the milliseconds of each."""
    times: list[float] = []
    data = {m: _rows(m, 1) for m in members}

    async def one(member: int) -> None:
        begin = time.perf_counter()
        status, _ = await _request(port, data[member])
        times.append(1000 * (time.perf_counter() - begin))
        assert status == 200, status

    end, tasks, turn = time.perf_counter() + seconds, [], 0
    while time.perf_counter() < end:
        tasks.append(asyncio.create_task(one(members[turn % len(members)])))
        turn += 1
        await asyncio.sleep(1 / (RATE * len(members)))
    await asyncio.gather(*tasks)
    return sorted(times)


async def _flooded(port: int, seconds: float) -> list[float]:
    """As `_steady`, while member 0 sends calls of 64 rows over ten connections."""
    data, stop = _rows(0, FLOOD_ROWS), time.perf_counter() + seconds

    async def flood() -> None:
        while time.perf_counter() < stop:
            await _request(port, data)

    flooding = [asyncio.create_task(flood()) for _ in range(FLOODING)]
    times = await _steady(port, seconds, range(1, TENANTS + 1))
    await asyncio.gather(*flooding)
    return times


def flood(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measures how one member's flood changes the others' times."""
    with running("serve", MLP, folder, {}) as (port, _):
        alone = asyncio.run(_steady(port, options.seconds, range(1, TENANTS + 1)))
        flooded = asyncio.run(_flooded(port, options.seconds))
        again = asyncio.run(_steady(port, options.seconds, range(1, TENANTS + 1)))
    p99 = [round(t[int(0.99 * len(t))], 3) for t in (alone, flooded, again)]
    return {
        "alone_p99_ms": p99[0],
        "flooded_p99_ms": p99[1],
        "again_p99_ms": p99[2],
        "requests": len(flooded),
    }


def _anonymous_mb(pid: int) -> float:
    text = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("RssAnon")) / 1000


def overload(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Sends three times as many requests as the server answers in a closed loop."""
    requests(MLP, "uniform", "binary", folder / "r.json")
    with running("serve", MLP, folder, {}, ("--max-queue", "64")) as (port, pids):
        before = load(port, pids, folder / "r.json", options.seconds, 32)
        memory = _anonymous_mb(pids[0])
        counts, times, refused = asyncio.run(
            _open_loop(port, 3 * before["requests_per_s"], 4 * options.seconds)
        )
        time.sleep(5)
        after = load(port, pids, folder / "r.json", options.seconds, 32)
        grown = _anonymous_mb(pids[0]) - memory
    return {
        "capacity_per_s": before["requests_per_s"],
        "statuses": {str(k): v for k, v in sorted(counts.items())},
        "accepted_p99_ms": round(times[int(0.99 * len(times))], 3),
        "refusals_with_retry_after": refused,
        "memory_grown_mb": round(grown, 1),
        "p50_before_ms": before["p50_ms"],
        "p50_after_ms": after["p50_ms"],
    }


async def _open_loop(port: int, rate: float, seconds: float) -> tuple[Counter[int], list[float], int]:
    """Sends requests at a rate over at most 2,000 connections. Returns: statuses, milliseconds of the
    accepted ones, and how many refusals have the header Retry-After.
    """
    counts: Counter[int] = Counter()
    times: list[float] = []
    refusals = 0
    data = [_rows(m, 1) for m in range(NETWORKS[MLP][1])]
    room = asyncio.Semaphore(2_000)

    async def one(number: int) -> None:
        nonlocal refusals
        async with room:
            begin = time.perf_counter()
            status, headers = await _request(port, data[number % len(data)])
            counts[status] += 1
            if status == 200:
                times.append(1000 * (time.perf_counter() - begin))
            refusals += status == 503 and b"retry-after" in headers

    end, number, tasks = time.perf_counter() + seconds, 0, []
    while time.perf_counter() < end:
        for _ in range(max(int(rate / 100), 1)):
            tasks.append(asyncio.create_task(one(number)))
            number += 1
        await asyncio.sleep(0.01)
    await asyncio.gather(*tasks)
    return counts, sorted(times), refusals


PARTS = {
    "protocol": protocol,
    "latency": latency,
    "ensemble": ensemble,
    "start": start,
    "flood": flood,
    "overload": overload,
}


def main() -> None:
    """Measures all parts, and writes them after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--out", default=str(ROOT / "bench" / "results" / "serve-limits-cpu.json"))
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--part", choices=list(PARTS), action="append")
    options = parser.parse_args()
    torch.set_num_threads(1)
    what = (__doc__ or "").splitlines()[0]
    document: dict[str, Any] = {"what": what, "environment": environment("cpu", 1)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        built(MLP, folder)
        for part in options.part or PARTS:
            document[part] = PARTS[part](folder, options)
            Path(options.out).write_text(json.dumps(document, indent=1) + "\n")
            print(part, document[part])


if __name__ == "__main__":
    main()
