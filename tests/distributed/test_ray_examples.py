"""Tests the examples for Ray. They need `pip install "ray[serve,data]"`, and are skipped without it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import ROOT
from torch import nn

import widepack

EXAMPLES = ROOT / "examples" / "serve"
FOLDERS = [EXAMPLES, ROOT, ROOT / "artifacts"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason='needs Ray: pip install "ray[serve,data]"'),
]


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    models = [nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)) for _ in range(4)]
    widepack.fuse(models, torch.randn(8, 6)).eval().save(tmp_path / "ens.wide")
    return tmp_path / "ens.wide"


def process(words: list[str], home: Path) -> str:
    """Runs a Python process of its own user and returns its output."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=home,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={
            **os.environ,
            "HOME": str(home),
            "PYTHONPATH": os.pathsep.join([*map(str, FOLDERS), os.environ.get("PYTHONPATH", "")]),
            "RAY_USAGE_STATS_ENABLED": "0",
        },
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_files_are_short() -> None:
    for name in ("ray_data.py", "ray_serve.py"):
        assert len((EXAMPLES / name).read_text(encoding="utf-8").splitlines()) < 40


def test_ray_data_scores_every_row(artifact: Path, tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    x = torch.randn(600, 6)
    pq.write_table(pa.table({"id": range(600), "x": list(x.numpy())}), tmp_path / "rows.parquet")
    process([str(EXAMPLES / "ray_data.py"), str(artifact), "rows.parquet", "scores"], tmp_path)
    scores = pq.read_table(tmp_path / "scores").sort_by("id").to_pydict()
    assert scores["id"] == list(range(600))
    wanted = widepack.load(artifact).reduce(x, "mean", "std")
    for name, value in wanted.items():
        torch.testing.assert_close(torch.tensor(scores[name]), value)


SERVED = """
import json, sys, urllib.request
from ray import serve
import ray_serve
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[2])})
serve.run(ray_serve.build({"artifact": sys.argv[1], "replicas": "2"}))
request = urllib.request.Request(f"http://127.0.0.1:{sys.argv[2]}/v2/models/ens/infer", sys.argv[3].encode())
print("ANSWER", urllib.request.urlopen(request).read().decode())
serve.shutdown()
"""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@pytest.mark.skipif(find_spec("widepack_serve") is None, reason="needs widepack_serve")
def test_ray_serve_answers_as_the_artifact(artifact: Path, tmp_path: Path) -> None:
    x = torch.randn(3, 6)
    inputs: list[dict[str, Any]] = [
        {"name": "input", "shape": [3, 6], "datatype": "FP32", "data": x.flatten().tolist()}
    ]
    words = [str(artifact), str(free_port()), json.dumps({"inputs": inputs})]
    output = process(["-c", SERVED, *words], tmp_path)
    answer = json.loads(next(row for row in output.splitlines() if row.startswith("ANSWER"))[7:])
    found = torch.tensor(answer["outputs"][0]["data"]).reshape(4, 3, 3)
    torch.testing.assert_close(found, widepack.load(artifact)(x))


KILLED = """
import json, sys, threading, time, urllib.request
import ray, torch, widepack
from ray import serve
import ray_serve

artifact, port = sys.argv[1:]
serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
serve.run(ray_serve.build({"artifact": artifact, "replicas": "2"}))
xs = torch.randn(16, 3, 6)
with torch.inference_mode():
    ens = widepack.load(artifact)
    wanted = [ens(x) for x in xs]
counts = {phase: {"right": 0, "wrong": 0, "failed": 0} for phase in ("before", "during", "after")}
phase, ended, lock, errors = "before", threading.Event(), threading.Lock(), []

def ask(number, member):
    inputs = [{"name": "input", "shape": [3, 6], "datatype": "FP32", "data": xs[number].flatten().tolist()}]
    body = json.dumps({"id": str(number), "inputs": inputs}).encode()
    url = f"http://127.0.0.1:{port}/v2/models/ens.{member}/infer"
    with urllib.request.urlopen(urllib.request.Request(url, body), timeout=30) as answer:
        found = json.load(answer)
    y = torch.tensor(found["outputs"][0]["data"]).reshape(3, 3)
    right = found["id"] == str(number) and torch.allclose(y, wanted[number][member], rtol=1e-4, atol=1e-5)
    return "right" if right else "wrong"

def client(start):
    number = start
    while not ended.is_set():
        began = phase
        try:
            result = ask(number % 16, number % 4)
        except (OSError, ValueError) as e:  # also an HTTP status of an error
            result = "failed"
            errors.append(repr(e))
        with lock:  # "before" and "after" have the requests that began and ended there
            counts[began if began == phase else "during"][result] += 1
        number += 5

def replicas():
    named = ray.util.list_named_actors(all_namespaces=True)
    return {a["name"] for a in named if a["name"].startswith("SERVE_REPLICA")}

def running():
    (deployment,) = serve.status().applications["default"].deployments.values()
    return {state.name if hasattr(state, "name") else str(state): n
            for state, n in deployment.replica_states.items() if n} == {"RUNNING": 2}

def wait(until, seconds):
    limit = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < limit, (counts, errors[-3:])
        time.sleep(0.05)

threads = [threading.Thread(target=client, args=(i,)) for i in range(4)]
for thread in threads:
    thread.start()
wait(lambda: counts["before"]["right"] >= 50, 60)
first = replicas()
killed = sorted(first)[0]
phase = "during"
ray.kill(ray.get_actor(killed, namespace="serve"))
wait(lambda: killed not in replicas() and len(replicas()) == 2 and running(), 120)
phase = "after"
wait(lambda: counts["after"]["right"] >= 200 or counts["after"]["failed"], 60)
ended.set()
for thread in threads:
    thread.join()
print("COUNTS", json.dumps({**counts, "replicas": [len(first), len(first & replicas()), len(replicas())]}))
print(errors[:5])
serve.shutdown()
"""


@pytest.mark.skipif(find_spec("widepack_serve") is None, reason="needs widepack_serve")
def test_ray_serve_goes_on_after_the_death_of_a_replica(artifact: Path, tmp_path: Path) -> None:
    """Requests of the replica that dies may fail. No answer is wrong, and none fails after the restart."""
    output = process(["-c", KILLED, str(artifact), str(free_port())], tmp_path)
    counts = json.loads(next(row for row in output.splitlines() if row.startswith("COUNTS"))[7:])
    before, during, after = (counts[phase] for phase in ("before", "during", "after"))
    assert before["right"] >= 50 and before["failed"] == 0
    assert during["right"] and after["right"] >= 200 and after["failed"] == 0
    assert not before["wrong"] + during["wrong"] + after["wrong"]
    assert counts["replicas"] == [2, 1, 2]  # one of the two is another one
