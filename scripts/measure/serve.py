"""Measures `widepack serve` beside a dict of modules behind the same protocol code.

    python scripts/measure/serve.py [--seconds 4] [--rounds 3] [--only TEXT]

Each request has one row for one member, and 32 connections send the next one when the answer came. The
servers run one after the other, in turns, with one thread an op: `serve` is `widepack serve` with
`--workers` processes, `dict` is `serve_dict.py` with one process for each processor, of this checkout or of
`--baseline`, a checkout with an environment in `.venv`. `again` is `serve` once more, started anew: its ratio
to `serve` is the noise. The client is a process of its own on the same machine, and takes as much time as the
server, so compare `cpu_us`, the server's CPU time of a request, before requests a second.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import orjson
import torch
from http_load import family
from route_networks import NETWORKS, members_of, trunk
from runner import built, in_turns, parser, run

HERE = Path(__file__).resolve().parent
KINDS = ("serve", "dict", "again")
REQUESTS, START_S = 512, 300.0
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def write_requests(network: str, ids: str, form: str, path: Path) -> None:
    """Writes requests of one row for drawn members. form: `binary` or `json`."""
    _, count, shape = NETWORKS[network]
    rows = []
    for number, member in enumerate(members_of(ids, REQUESTS, count)):
        torch.manual_seed(number)
        x = torch.randn(1, *shape)
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


def _ready(port: int, process: subprocess.Popen[bytes]) -> None:
    """Waits until a server answers. Raises: RuntimeError."""
    limit = time.monotonic() + START_S
    while time.monotonic() < limit and process.poll() is None:
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=1):
            return
        time.sleep(0.05)
    raise RuntimeError(f"a server did not start: exit code {process.poll()}")


@contextmanager
def running(
    kind: str, network: str, folder: Path, words: Sequence[str], baseline: Path | None
) -> Iterator[tuple[int, list[int]]]:
    """Runs a server. Yields: its port, and its processes.

    words: options of `widepack serve`. baseline: the checkout of `dict`; None for this one.
    """
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        listener.set_inheritable(True)
        port, number = listener.getsockname()[1], listener.fileno()
        if kind == "dict":
            python, script = (
                (baseline / ".venv/bin/python", baseline / "scripts/measure/serve_dict.py")
                if baseline
                else (sys.executable, HERE / "serve_dict.py")
            )
            command = [str(python), str(script), str(folder), network, str(number)]
            count = os.cpu_count() or 1
            found = [subprocess.Popen(command, pass_fds=[number], env=ENVIRONMENT) for _ in range(count)]
        else:
            listener.close()
            command = [sys.executable, "-m", "widepack_cli", "serve", f"ens={folder / 'e.wide'}"]
            command += ["--port", str(port), "--threads", "1", "--drain", "0", *words]
            found = [subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.DEVNULL)]
        try:
            _ready(port, found[0])
            yield port, [p.pid for p in found]
        finally:
            _end(found)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Ends processes and what they started."""
    pids = family(p.pid for p in processes)
    for process in processes:
        process.send_signal(signal.SIGTERM)
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def loaded(network: str, folder: Path, given: argparse.Namespace, kind: str, number: int) -> dict[str, Any]:
    """Runs one server and its client once. Raises: RuntimeError for an answer that is not 200."""
    words = ("--workers", str(given.workers))
    with running(kind, network, folder, words, given.baseline) as (port, pids):
        document = {"port": port, "connections": given.connections, "seconds": given.seconds, "warm": 1.0}
        document |= {"pids": pids, "requests": str(folder / "requests.json")}
        client = [sys.executable, str(HERE / "http_load.py"), json.dumps(document)]
        done = subprocess.run(client, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    if found["wrong"]:
        raise RuntimeError(f"{found['wrong']} answers were not 200: {found['first_wrong']}")
    return found


def measured(network: str, ids: str, form: str, given: argparse.Namespace) -> dict[str, Any]:
    """Measures one row: all servers in turns."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make, members, shape = NETWORKS[network]
        built(folder, make, members, [f"input=float32[B,{','.join(map(str, shape))}]"], shared=trunk)
        write_requests(network, ids, form, folder / "requests.json")
        rounds = in_turns(KINDS, partial(loaded, network, folder, given), given.rounds)
    keys = ("requests_per_s", "p50_ms", "p99_ms", "cpu_us", "memory_mb")
    middle = {kind: {k: round(median(r[k] for r in rows), 3) for k in keys} for kind, rows in rounds.items()}

    def ratio(key: str, one: str, other: str) -> float:
        return float(round(middle[one][key] / middle[other][key], 3))

    return {
        "network": network,
        "members": members,
        "ids": ids,
        "form": form,
        "connections": given.connections,
        "workers": given.workers,
        "servers": middle,
        "rounds": rounds,
        "requests_ratio": ratio("requests_per_s", "serve", "dict"),
        "cpu_ratio": ratio("cpu_us", "serve", "dict"),
        "p99_ratio": ratio("p99_ms", "serve", "dict"),
        "noise": ratio("requests_per_s", "again", "serve"),
        "cpu_noise": ratio("cpu_us", "again", "serve"),
    }


def main() -> int:
    options = parser(__doc__, "serve-cpu.json")
    options.add_argument("--seconds", type=float, default=4.0, help="of each run of a server (default: 4)")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--workers", type=int, default=1, help="processes of widepack serve")
    options.add_argument(
        "--baseline", type=Path, help="a checkout whose serve_dict.py runs (default: this one)"
    )
    options.add_argument("--connections", type=int, default=32)
    options.add_argument("--form", choices=["binary", "json"], default="binary", dest="body")
    given = options.parse_args()
    torch.set_num_threads(1)
    cases = {
        f"{network}, {ids}, {given.body}": partial(measured, network, ids, given.body, given)
        for network in NETWORKS
        for ids in ("uniform", "zipf")
    }
    return run(given, cases)


if __name__ == "__main__":
    sys.exit(main())
