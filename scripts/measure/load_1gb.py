#!/usr/bin/env python3
"""Times `widepack.load` on an artifact of 1 GB: seconds without `import torch`, and private memory (RssAnon),
in new processes.

usage: scripts/measure/load_1gb.py [-o bench/results/load-1gb-cpu.json] [--runs 5]

16 members of four 2048 x 2048 linear layers. The first load on a machine runs the probe. Later runs
read the passed probe from the cache. The script also times the start of `widepack --help` and `widepack
inspect`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import widepack
from widepack_bench.report.environment import environment

ROOT = Path(__file__).resolve().parents[2]
LOAD = """
import json, sys, time
import torch
def anon():
    line = next(line for line in open("/proc/self/status") if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024
before, start = anon(), time.perf_counter()
import widepack
ens = widepack.load(sys.argv[1], prologue=sys.argv[2] == "on")
loaded, after = time.perf_counter(), anon()
ens(torch.zeros(2, 2048))
first_call_s = time.perf_counter() - loaded
print(json.dumps({"load_s": loaded - start, "first_call_s": first_call_s, "anon_bytes": after - before}))
"""


def net() -> nn.Module:
    return nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(2048, 2048), nn.ReLU())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--out", default=str(ROOT / "bench/results/load-1gb-cpu.json"))
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for i in range(16):
            torch.manual_seed(i)
            paths.append(f"{folder}/m{i}.pt")
            torch.save(net().state_dict(), paths[-1])
        report = widepack.build(paths, f"{folder}/e.wide", model=net, inputs=["input=float32[B,2048]"])
        document: dict[str, Any] = {
            "command": shlex.join(["scripts/measure/load_1gb.py", *sys.argv[1:]]),
            "environment": environment("cpu", torch.get_num_threads()),
        }
        document |= {
            "weights_bytes": sum(report.weights.values()),
            "build_seconds": report.seconds,
            "loads": [],
        }
        env = {**os.environ, "XDG_CACHE_HOME": f"{folder}/cache"}
        for prologue in ("off", "on"):
            for run in range(given.runs):
                done = subprocess.run(
                    [sys.executable, "-c", LOAD, f"{folder}/e.wide", prologue],
                    capture_output=True,
                    text=True,
                    check=True,
                    env=env,
                )
                row = {
                    "prologue": prologue,
                    "probe": "run" if run == 0 else "remembered",
                    **json.loads(done.stdout),
                }
                row["anon_share_of_weights"] = row["anon_bytes"] / document["weights_bytes"]
                document["loads"].append(row)
                print(row, flush=True)
        for arguments in (["--help"], ["inspect", f"{folder}/e.wide"]):
            seconds = []
            for _ in range(given.runs):
                start = time.perf_counter()
                subprocess.run(
                    [sys.executable, "-m", "widepack_cli", *arguments],
                    capture_output=True,
                    check=True,
                    env=env,
                )
                seconds.append(time.perf_counter() - start)
            document[f"{arguments[0].strip('-')}_s"] = sorted(seconds)
            print(arguments[0], sorted(seconds), flush=True)
    Path(given.out).write_text(json.dumps(document, indent=1) + "\n")


main()
