"""Compares the speed of two checkouts of widepack: start-up, load and calls, alternating, in new processes.

    taskset -c 1 python scripts/measure/two_checkouts.py OLD NEW --rows mlp-b1,vit [-o FILE] [--rounds 9]

OLD and NEW are folders of checkouts; both run with this Python. `--rows` names rows of the suite of networks.
Each checkout builds an artifact of each row from the same checkpoints. Each round runs every measurement
once in each checkout, in alternating order. Python loads the bytecode of each checkout, as it does after an
installation. A ratio is the median over rounds of NEW over OLD. Its range
covers the middle half of the rounds.

| measurement | what it times |
|---|---|
| `--help`, `inspect` | a complete process of the command line |
| `build NAME` | `widepack.build`, in the first rounds, after torch is imported |
| `load NAME` | `widepack.load` of an artifact, after torch is imported |
| `call NAME` | the median call `ens(...)` at the row's batch, of at least 20 calls, one thread |
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
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
args, kwargs, _ = make(ens.manifest.entries[name], int(sys.argv[2]))
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
BUILD = """
import json, sys, time
import torch
torch.set_num_threads(1)
import widepack
row = json.loads(sys.argv[1])
start = time.perf_counter()
widepack.build(row["paths"], sys.argv[2], model=row["model"], model_args=row["options"],
               inputs=row["inputs"], pt2=False)
print(time.perf_counter() - start)
"""
ROWS = """
import json, sys
from pathlib import Path
from widepack_bench.suite.row import _checkpoints
from widepack_bench.suite.rows import ROWS
rows = []
for row in ROWS:
    if row.name in sys.argv[2].split(","):
        folder = Path(sys.argv[1], row.name)
        folder.mkdir()
        form = row.form("cpu")
        rows.append({"name": row.name, "batch": row.batch, "model": row.model, "options": dict(form.options),
                     "inputs": list(form.inputs), "paths": _checkpoints(row, "cpu", str(folder))})
print(json.dumps(rows))
"""


def run(checkout: Path, *words: str) -> str:
    """Runs a Python command with the packages of a checkout and returns its standard output."""
    path = os.pathsep.join(str(checkout / package) for package in PACKAGES)
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *words]
    done = subprocess.run(
        command, env=environment, cwd=checkout, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout


def compiled(checkout: Path) -> None:
    """Compiles the packages of a checkout to bytecode, as pip does when it installs a package."""
    run(checkout, "-m", "compileall", "-q", "widepack", "artifacts", "bench", "cli")


def built(checkout: Path, rows: list[dict[str, Any]], folder: Path) -> dict[str, float]:
    """Builds the artifact of each row in a new folder and returns its seconds."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return {
        f"build {row['name']}": float(
            run(checkout, "-c", BUILD, json.dumps(row), str(folder / f"{row['name']}.wide")).splitlines()[-1]
        )
        for row in rows
    }


def measured(checkout: Path, rows: list[dict[str, Any]], folder: Path) -> dict[str, float]:
    """Runs every measurement once and returns its seconds."""
    found = {}
    inspected = str(folder / f"{rows[0]['name']}.wide")
    for name, words in (("--help", ["--help"]), ("inspect", ["inspect", inspected])):
        start = time.perf_counter()
        run(checkout, "-m", "widepack_cli", *words)
        found[name] = time.perf_counter() - start
    for row in rows:
        path = folder / f"{row['name']}.wide"
        seconds = json.loads(run(checkout, "-c", CALLS, str(path), str(row["batch"])).splitlines()[-1])
        found |= {f"{what} {row['name']}": value for what, value in seconds.items()}
    return found


def compared(old: list[dict[str, float]], new: list[dict[str, float]]) -> dict[str, Any]:
    """Returns the medians in milliseconds of each measurement, and the ratio with its range."""
    rows = {}
    for name in old[0]:
        pairs = [(a[name], b[name]) for a, b in zip(old, new, strict=True) if name in a]
        ratios = sorted(b / a for a, b in pairs)
        quarter = len(ratios) // 4
        rows[name] = {
            "rounds": len(pairs),
            "old_ms": round(1e3 * statistics.median(a for a, _ in pairs), 4),
            "new_ms": round(1e3 * statistics.median(b for _, b in pairs), 4),
            "ratio": round(statistics.median(ratios), 4),
            "range": [round(ratios[quarter], 4), round(ratios[-1 - quarter], 4)],
        }
    return rows


def measure(given: argparse.Namespace) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Runs all rounds and returns the measurements of both checkouts, one row for each round."""
    old, new = given.old.resolve(), given.new.resolve()
    sides: dict[Path, list[dict[str, float]]] = {old: [], new: []}
    with tempfile.TemporaryDirectory(prefix="widepack-checkouts-") as temporary:
        for checkout in (old, new):
            compiled(checkout)
        rows = json.loads(run(new, "-c", ROWS, temporary, given.rows))
        folders = {old: Path(temporary, "old"), new: Path(temporary, "new")}
        for number in range(given.rounds + 1):
            for checkout in (old, new) if number % 2 else (new, old):
                built_s = built(checkout, rows, folders[checkout]) if number <= given.builds else {}
                row = measured(checkout, rows, folders[checkout])
                if number:  # the first round fills caches
                    sides[checkout].append(row | built_s)
            print(f"round {number} of {given.rounds}", file=sys.stderr, flush=True)
    return sides[old], sides[new]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--rows", default="mlp-b1,conv-net,vit,bert,gru-8")
    parser.add_argument("-o", "--out", type=Path, default=ROOT / "bench/results/two-checkouts-cpu.json")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--builds", type=int, default=3, help="rounds that build, in addition to the first")
    given = parser.parse_args()
    old, new = measure(given)
    rows = compared(old, new)
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
    arguments = [Path(word).name if os.sep in word else word for word in sys.argv[1:]]
    document = {
        "environment": environment("cpu", 1)
        | {"command": shlex.join(["scripts/measure/two_checkouts.py", *arguments])},
        "commits": commits,
        "rows": rows,
    }
    given.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
