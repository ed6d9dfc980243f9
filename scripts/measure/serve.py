#!/usr/bin/env python3
"""Measures `widepack serve` beside a dict of modules behind the same protocol code.

    python scripts/measure/serve.py [-o bench/results/serve-cpu.json] [--seconds 4] [--rounds 3] [--network
    NAME]
        [--peer fastapi=PYTHON] [--peer litserve=PYTHON] [--peer kserve=PYTHON]

Each request has one row for one member, and 32 connections send the next one when the answer came. The
servers run one after the other, in turns, with one thread an op: `serve` is `widepack serve` with one
process, `dict` is
`serve_dict.py` with one process for each processor. `again` is `serve` once more, started anew: its ratio to
`serve` is the noise. A peer is another server with a dict of modules (`serve_peers.py`), run by the Python
of an environment of its own, with JSON. The client is a process of its own on the same machine, which takes
as much time as the server, so compare `cpu_us`, the server's CPU time of a request, before requests a second.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import orjson
import torch
from http_load import family
from route_networks import NETWORKS, members_of

import widepack
from widepack_bench.report.environment import environment

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
PEERS = ("fastapi", "litserve", "kserve")
CONNECTIONS = 32
REQUESTS = 512
START_S = 60.0
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def built(network: str, folder: Path) -> Path:
    """Builds the artifact of a network's members, and keeps their checkpoints."""
    make, count, shape = NETWORKS[network]
    files = []
    for i in range(count):
        torch.manual_seed(i)
        files.append(folder / f"m{i}.pt")
        torch.save(make().state_dict(), files[-1])
    sizes = ",".join(map(str, shape))
    widepack.build(files, folder / "ens.wide", model=make, inputs=[f"input=float32[B,{sizes}]"], pt2=False)
    return folder / "ens.wide"


def requests(network: str, ids: str, form: str, path: Path) -> None:
    """Writes requests of one row for drawn members. form: `binary`, `json`, or the name of a peer."""
    _, count, shape = NETWORKS[network]
    rows = []
    for number, member in enumerate(members_of(ids, REQUESTS, count)):
        torch.manual_seed(number)
        x = torch.randn(1, *shape)
        if form in PEERS:
            rows.append(_peer_request(form, member, x))
            continue
        one: dict[str, Any] = {"name": "input", "datatype": "FP32", "shape": list(x.shape)}
        headers = {"Content-Type": "application/octet-stream"}
        if form == "json":
            body = orjson.dumps({"inputs": [{**one, "data": x.reshape(-1).tolist()}]})
        else:
            data = x.numpy().tobytes()
            one["parameters"] = {"binary_data_size": len(data)}
            head = orjson.dumps({"inputs": [one], "parameters": {"binary_data_output": True}})
            headers["Inference-Header-Content-Length"] = str(len(head))
            body = head + data
        rows.append([f"/v2/models/ens.{member}/infer", headers, base64.b64encode(body).decode()])
    path.write_text(json.dumps(rows))


def _peer_request(peer: str, member: int, x: torch.Tensor) -> list[Any]:
    """Returns a request as a peer takes it: path, headers, body."""
    data, shape = x.reshape(-1).tolist(), list(x.shape)
    paths = {"fastapi": f"/predict/{member}", "litserve": "/predict", "kserve": f"/v2/models/m{member}/infer"}
    documents: dict[str, dict[str, Any]] = {
        "fastapi": {"x": data, "shape": shape},
        "litserve": {"member": member, "x": data, "shape": shape},
        "kserve": {"inputs": [{"name": "input", "datatype": "FP32", "shape": shape, "data": data}]},
    }
    body = base64.b64encode(orjson.dumps(documents[peer])).decode()
    return [paths[peer], {"Content-Type": "application/json"}, body]


def _free_socket() -> socket.socket:
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    listener.set_inheritable(True)
    return listener


def _wait(port: int, process: subprocess.Popen[bytes]) -> None:
    limit = time.monotonic() + START_S
    while time.monotonic() < limit and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=1):
                return
        except OSError:
            time.sleep(0.05)
    raise SystemExit(f"a server did not start: exit code {process.poll()}")


@contextmanager
def running(kind: str, network: str, folder: Path, peers: dict[str, str]) -> Iterator[tuple[int, list[int]]]:
    """Runs a server. Yields: its port, and the numbers of its processes."""
    with _free_socket() as listener:
        port = listener.getsockname()[1]
        if kind == "dict":
            number = str(listener.fileno())
            command = [sys.executable, str(HERE / "serve_dict.py"), str(folder), network, number]
            found = [
                subprocess.Popen(command, pass_fds=[listener.fileno()], env=ENVIRONMENT)
                for _ in range(os.cpu_count() or 1)
            ]
        elif kind in peers:
            listener.close()
            words = [str(HERE / "serve_peers.py"), kind, str(folder), network, str(port)]
            found = [
                subprocess.Popen(
                    [peers[kind], *words], env=ENVIRONMENT, stdout=subprocess.DEVNULL, start_new_session=True
                )
            ]
        else:
            listener.close()
            words = [
                "serve",
                f"ens={folder / 'ens.wide'}",
                "--port",
                str(port),
                "--threads",
                "1",
                "--drain",
                "0",
            ]
            command = [sys.executable, "-m", "widepack_cli", *words]
            found = [subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.DEVNULL)]
        try:
            _wait(port, found[0])
            yield port, [p.pid for p in found]
        finally:
            _end(found)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Ends processes and what they started: some servers leave processes behind."""
    pids = family(p.pid for p in processes)
    for process in processes:
        process.send_signal(signal.SIGTERM)
    for process in processes:
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


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
            with running(kind, network, folder, peers) as (port, pids):
                results.append(load(port, pids, file, options.seconds, options.connections))
    middle = {kind: _median(results) for kind, results in found.items()}
    ours, theirs = middle["serve"], middle["dict"]
    return {
        "network": network,
        "members": NETWORKS[network][1],
        "ids": ids,
        "form": form,
        "connections": options.connections,
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
