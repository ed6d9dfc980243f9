"""Compares the speed of two checkouts of widepack: start-up, load and calls, in turns and in fresh processes.

    taskset -c 1 python scripts/measure/two_checkouts.py OLD NEW ARTIFACT... [-o FILE] [--rounds 9]

OLD and NEW are folders of checkouts; both run with this Python. Each round runs every measurement once in
each checkout, in alternating order. A ratio is the median of NEW over OLD of the rounds; its range holds the
middle half.

| measurement | what it times |
|---|---|
| `--help`, `inspect` | a whole process of the command line |
| `load NAME` | `widepack.load` of an artifact, after torch is imported |
| `call NAME` | the median call `ens(...)` at batch 8, of at least 20 calls, one thread |
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (".", "artifacts", "bench", "cli")
CALLS = """
import json, statistics, sys, time
import torch
torch.set_num_threads(1)
import widepack
start = time.perf_counter()
ens = widepack.load(sys.argv[1])
load_s = time.perf_counter() - start
name = next(iter(ens.manifest.entries))
try:
    from widepack_bench.measure.inputs import make
except ImportError:  # the layout before the rooms
    from widepack_bench.inputs import make
args, kwargs, _ = make(ens.manifest.entries[name], 8)
seconds, end = [], time.perf_counter() + 1.0
with torch.inference_mode():
    for _ in range(3):
        ens(*args, **kwargs)
    while len(seconds) < 20 or time.perf_counter() < end:
        start = time.perf_counter()
        ens(*args, **kwargs)
        seconds.append(time.perf_counter() - start)
print(json.dumps({"load": load_s, "call": statistics.median(seconds)}))
"""


def run(checkout: Path, *words: str) -> str:
    """Runs a Python command with the packages of a checkout and returns its standard output."""
    path = os.pathsep.join(str(checkout / package) for package in PACKAGES)
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def measured(checkout: Path, artifacts: list[Path]) -> dict[str, float]:
    """Runs every measurement once and returns its seconds."""
    found = {}
    for name, words in (("--help", ["--help"]), ("inspect", ["inspect", str(artifacts[0])])):
        start = time.perf_counter()
        run(checkout, "-m", "widepack_cli", *words)
        found[name] = time.perf_counter() - start
    for artifact in artifacts:
        seconds = json.loads(run(checkout, "-c", CALLS, str(artifact)).splitlines()[-1])
        found |= {f"{what} {artifact.stem}": value for what, value in seconds.items()}
    return found


def compared(old: list[dict[str, float]], new: list[dict[str, float]]) -> dict[str, Any]:
    """Returns the medians in milliseconds of each measurement, and the ratio with its range."""
    rows = {}
    for name in old[0]:
        ratios = sorted(b[name] / a[name] for a, b in zip(old, new, strict=True))
        quarter = len(ratios) // 4
        rows[name] = {
            "old_ms": round(1e3 * statistics.median(row[name] for row in old), 4),
            "new_ms": round(1e3 * statistics.median(row[name] for row in new), 4),
            "ratio": round(statistics.median(ratios), 4),
            "range": [round(ratios[quarter], 4), round(ratios[-1 - quarter], 4)],
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("artifacts", type=Path, nargs="+")
    parser.add_argument("-o", "--out", type=Path, default=ROOT / "bench/results/two-checkouts-cpu.json")
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    sides: dict[Path, list[dict[str, float]]] = {given.old: [], given.new: []}
    for number in range(given.rounds + 1):
        for checkout in (given.old, given.new) if number % 2 else (given.new, given.old):
            row = measured(checkout.resolve(), given.artifacts)
            if number:  # the first round fills caches
                sides[checkout].append(row)
    rows = compared(sides[given.old], sides[given.new])
    for name, row in rows.items():
        print(
            f"{name:<24} {row['old_ms']:>10.3f} ms {row['new_ms']:>10.3f} ms  "
            f"{row['ratio']:.3f} {row['range']}"
        )
    sys.path[:0] = [str(ROOT / package) for package in PACKAGES]
    from widepack_bench.report.environment import environment

    commits = {
        side: subprocess.run(
            ["git", "-C", str(path), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for side, path in (("old", given.old), ("new", given.new))
    }
    words = [Path(word).name if os.sep in word else word for word in sys.argv[1:]]
    document = {
        "environment": environment("cpu", 1),
        "command": shlex.join(["scripts/measure/two_checkouts.py", *words]),
        "commits": commits,
        "rows": rows,
    }
    given.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
