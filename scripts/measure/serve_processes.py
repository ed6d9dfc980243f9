"""Starts servers for measurements, and makes their artifacts and requests."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import orjson
import torch
from http_load import family
from route_networks import NETWORKS, members_of

import widepack

HERE = Path(__file__).resolve().parent
PEERS = ("fastapi", "litserve", "kserve")
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
def running(
    kind: str, network: str, folder: Path, peers: dict[str, str], options: Sequence[str] = ()
) -> Iterator[tuple[int, list[int]]]:
    """Runs a server. Yields: its port, and the numbers of its processes.

    kind: `dict`, a peer, or anything else for `widepack serve` with more `options`.
    """
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
            script = ["serve_litserve.py"] if kind == "litserve" else ["serve_peers.py", kind]
            words = [str(HERE / script[0]), *script[1:], str(folder), network, str(port)]
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
                *options,
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
