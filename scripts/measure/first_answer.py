#!/usr/bin/env python3
"""Measures the time of a process to its first answer, without `import torch`. Compiled programs are in the
cache, and the machine has no compiler.

    taskset -c 1 python scripts/measure/first_answer.py [-o bench/results/first-answer-cpu.json] [--rounds 15]

The artifact has 100 MB of weights: 8 members of a 3-layer MLP of width 1024. Every figure is wall-clock time
from just before the start of a process to a mark that the process prints. All processes read the same clock.
A round starts one process of each kind, in changing order. The kind `torch` only imports torch: the time of
another kind beyond `import torch` is the difference of two processes of one round. `in_process_ms` is
measured within one process, from the end of `import torch`, and depends less on the time of that import. The
figures are medians over rounds, with 95% intervals. The goal applies to the upper end of the first interval.

| kind | what the process does |
|---|---|
| `torch` | imports torch |
| `aot` | loads with backend `aot` from the warm cache, and calls once; the probe has passed on this machine |
| `aot, probe` | the same, and runs the artifact's probe, as the first process on a machine does |
| `eager` | loads with backend `eager`, and calls once |

The files are in the page cache of the system. Before the timing, the script compares the answers of `aot`
with those of the members.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import widepack
from widepack_bench.measure.race import median_interval, order
from widepack_bench.report.environment import environment

ROOT = Path(__file__).resolve().parents[2]
MEMBERS, WIDTH, LAYERS, BATCH = 8, 1024, 3, 1
GOAL_MS = 500
COMPILERS = ("c++", "g++", "clang++", "cc", "gcc", "clang", "icpx", "nvcc")
KINDS = ("torch", "aot", "aot, probe", "eager")
CHILD = """
import sys, time
marks = [("python", time.monotonic_ns())]
import torch
marks.append(("torch", time.monotonic_ns()))
kind, path, cache = sys.argv[1:4]
if kind != "torch":
    import widepack
    widepack.load
    marks.append(("widepack", time.monotonic_ns()))
    ens = widepack.load(path, backend=kind, cache=cache)
    marks.append(("load", time.monotonic_ns()))
    ens(torch.zeros(int(sys.argv[4]), int(sys.argv[5])))
    marks.append(("answer", time.monotonic_ns()))
import json
print(json.dumps(marks))
"""


def net() -> nn.Module:
    return nn.Sequential(*(part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))


def made(folder: Path) -> tuple[Path, Path, int]:
    """Returns the artifact, the folder of its compiled programs, and the bytes of its weights."""
    modules, paths = [], []
    for i in range(MEMBERS):
        torch.manual_seed(i)
        modules.append(net().eval())
        paths.append(folder / f"m{i}.pt")
        torch.save(modules[-1].state_dict(), paths[-1])
    artifact, cache = folder / "e.wide", folder / "compiled"
    report = widepack.build(
        paths, artifact, model=net, inputs=[f"input=float32[B,{WIDTH}]"], targets=("cpu",), pt2=False
    )
    ens = widepack.load(artifact, backend="aot", compile="now", cache=cache)
    x = torch.randn(4, WIDTH)
    with torch.inference_mode():
        torch.testing.assert_close(ens(x), torch.stack([m(x) for m in modules]))
    return artifact, cache, sum(report.weights.values())


def child(kind: str, artifact: Path, cache: Path, home: Path, threads: int) -> dict[str, float]:
    """Returns the milliseconds from just before the start of the process to each of its marks."""
    kept = {k: v for k, v in os.environ.items() if k not in ("CC", "CXX", "WIDEPACK_CACHE", "WIDEPACK_PLANS")}
    env = {**kept, "PATH": "/nonexistent", "XDG_CACHE_HOME": str(home), "OMP_NUM_THREADS": str(threads)}
    if found := [c for c in COMPILERS if shutil.which(c, path=env["PATH"])]:
        raise SystemExit(f"the processes that are timed would find a compiler: {', '.join(found)}")
    command = [
        sys.executable,
        "-c",
        CHILD,
        kind.partition(",")[0],
        str(artifact),
        str(cache),
        str(BATCH),
        str(WIDTH),
    ]
    begin = time.monotonic_ns()
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        raise SystemExit(f"a process of kind {kind!r} failed: {done.stderr.strip().splitlines()[-1:]}")
    return {name: (at - begin) / 1e6 for name, at in json.loads(done.stdout)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-o", "--out", type=Path, default=ROOT / "bench/results/first-answer-cpu.json")
    parser.add_argument("--rounds", type=int, default=15, help="number of processes of each kind")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    rounds: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        artifact, cache, weights = made(folder)
        warm = folder / "warm"
        # the first process of each kind fills the caches of bytecode, passed probes and pages
        for kind in KINDS:
            child(kind, artifact, cache, warm, given.threads)
        for number in range(given.rounds):
            marks = {}
            for place in order(number, len(KINDS)):
                kind = KINDS[place]
                home = folder / f"cold{number}" if kind.endswith("probe") else warm
                marks[kind] = child(kind, artifact, cache, home, given.threads)
            rounds.append(marks)
    rows = {kind: row(kind, rounds) for kind in KINDS[1:]}
    for kind, one in rows.items():
        beyond, alone = one["beyond_torch_ms"], one["in_process_ms"]
        parts = ", ".join(f"{k} {v:.0f}" for k, v in one["parts_ms"].items())
        print(
            f"{kind}: {beyond['value']:.0f} ms [{beyond['low']:.0f}, {beyond['high']:.0f}] "
            f"beyond import torch; in the process itself {alone['value']:.0f}: {parts}"
        )
    record = {
        "what": __doc__,
        "environment": environment("cpu", given.threads),
        "members": MEMBERS,
        "weights_bytes": weights,
        "batch": BATCH,
        "rounds": given.rounds,
        "goal_ms": GOAL_MS,
        "import_torch_ms": median_interval([r["torch"]["torch"] for r in rounds]).to_json(),
        "rows": rows,
        "holds": rows["aot"]["beyond_torch_ms"]["high"] <= GOAL_MS,
    }
    given.out.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def row(kind: str, rounds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Returns the time of a kind beyond `import torch`, and the medians of its parts, in milliseconds."""
    parts = {}
    for before, name in (("torch", "widepack"), ("widepack", "load"), ("load", "answer")):
        parts[name] = statistics.median(r[kind][name] - r[kind][before] for r in rounds)
    return {
        "beyond_torch_ms": median_interval(
            [r[kind]["answer"] - r["torch"]["torch"] for r in rounds]
        ).to_json(),
        "in_process_ms": median_interval([r[kind]["answer"] - r[kind]["torch"] for r in rounds]).to_json(),
        "parts_ms": parts,
        "all_ms": [round(r[kind]["answer"] - r["torch"]["torch"], 1) for r in rounds],
    }


if __name__ == "__main__":
    main()
