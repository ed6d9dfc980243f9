#!/usr/bin/env python3
"""Measures `widepack serve` beside a dict of modules behind the same protocol code.

    python scripts/measure/serve.py [-o bench/results/serve-cpu.json] [--seconds 4] [--rounds 3]
        [--network NAME] [--peer fastapi=PYTHON] [--peer litserve=PYTHON] [--peer kserve=PYTHON]

Each request has one row for one member, and 32 connections send the next one when the answer came. The
servers run one after the other, in turns, with one thread an op: `serve` is `widepack serve` with one
process, `dict` is `serve_dict.py` with one process for each processor. `again` is `serve` once more, started
anew: its ratio to `serve` is the noise. A peer is another server with a dict of modules (`serve_peers.py`),
run by the Python of an environment of its own, with JSON. The client is a process of its own on the same
machine, which takes as much time as the server, so compare `cpu_us`, the server's CPU time of a request,
before requests a second.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch
from route_networks import NETWORKS
from serve_processes import built, requests, running

from widepack_bench.report.environment import environment

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
CONNECTIONS = 32


def load(port: int, pids: list[int], file: Path, seconds: float, connections: int) -> dict[str, Any]:
    """Runs the client once."""
    document = {
        "port": port,
        "connections": connections,
        "seconds": seconds,
        "warm": 1.0,
        "pids": pids,
        "requests": str(file),
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "http_load.py"), json.dumps(document)],
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    if found["wrong"]:
        raise SystemExit(f"{found['wrong']} answers were not 200: {found['first_wrong']}")
    return found


def row(network: str, folder: Path, ids: str, form: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measures one row: all servers in turns."""
    peers = dict(text.split("=", 1) for text in options.peer)
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in ("serve", "dict", "again", *peers)}
    for _ in range(options.rounds):
        for kind, results in found.items():
            file = folder / "requests.json"
            requests(network, ids, kind if kind in peers else form, file)
            with running(kind, network, folder, peers, ("--workers", str(options.workers))) as (port, pids):
                results.append(load(port, pids, file, options.seconds, options.connections))
    middle = {kind: _median(results) for kind, results in found.items()}
    ours, theirs = middle["serve"], middle["dict"]
    return {
        "network": network,
        "members": NETWORKS[network][1],
        "ids": ids,
        "form": form,
        "connections": options.connections,
        "workers": options.workers,
        "servers": middle,
        "rounds": found,
        "requests_ratio": round(ours["requests_per_s"] / theirs["requests_per_s"], 3),
        "cpu_ratio": round(ours["cpu_us"] / theirs["cpu_us"], 3),
        "p99_ratio": round(ours["p99_ms"] / theirs["p99_ms"], 3),
        "peer_cpu_ratios": {p: round(ours["cpu_us"] / middle[p]["cpu_us"], 3) for p in peers},
        "noise": round(middle["again"]["requests_per_s"] / ours["requests_per_s"], 3),
        "cpu_noise": round(middle["again"]["cpu_us"] / ours["cpu_us"], 3),
    }


def _median(rows: list[dict[str, Any]]) -> dict[str, float]:
    keys = ("requests_per_s", "p50_ms", "p99_ms", "cpu_us", "memory_mb")
    return {k: round(median(r[k] for r in rows), 3) for k in keys}


def main() -> None:
    """Measures all rows, and writes them after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--out", default=str(ROOT / "bench" / "results" / "serve-cpu.json"))
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1, help="processes of widepack serve")
    parser.add_argument("--connections", type=int, default=CONNECTIONS)
    parser.add_argument("--peer", metavar="NAME=PYTHON", action="append", default=[])
    parser.add_argument("--network", choices=list(NETWORKS), action="append")
    parser.add_argument("--ids", choices=["uniform", "zipf"], action="append")
    parser.add_argument("--form", choices=["binary", "json"], action="append")
    options = parser.parse_args()
    torch.set_num_threads(1)
    document: dict[str, Any] = {
        "what": (__doc__ or "").splitlines()[0],
        "environment": environment("cpu", 1),
        "rows": [],
    }
    for network in options.network or NETWORKS:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            built(network, folder)
            for ids in options.ids or ("uniform", "zipf"):
                for form in options.form or ("binary",):
                    found = row(network, folder, ids, form, options)
                    document["rows"].append(found)
                    Path(options.out).write_text(json.dumps(document, indent=1) + "\n")
                    print(
                        f"{network}, {ids}, {form}: {found['servers']['serve']} dict "
                        f"{found['servers']['dict']} "
                        f"requests x{found['requests_ratio']} cpu x{found['cpu_ratio']} p99 "
                        f"x{found['p99_ratio']} "
                        f"noise {found['noise']}"
                    )


if __name__ == "__main__":
    main()
