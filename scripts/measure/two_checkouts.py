"""Compares the speed of two checkouts of widepack: start-up, builds, loads and calls, in turns, in new
processes.

    taskset -c 1 python scripts/measure/two_checkouts.py OLD NEW --rows mlp-b1,vit [-o FILE] [--rounds 9]

OLD and NEW are folders of checkouts; both run with this Python. `--rows` names rows of the suite of
networks. Each checkout builds an artifact of each row from the same checkpoints. Each round runs every
measurement once in each checkout, in alternating order. Python loads the bytecode of each checkout, as it
does after an installation. A ratio is the median over rounds of NEW over OLD. Its range covers the middle
half of the rounds. The document is written after every round.

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
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from runner import file_of, in_turns, parser, say

from widepack_bench.models.factory import factory_of
from widepack_bench.models.weights import write_checkpoints
from widepack_bench.suite.rows import chosen

PACKAGES = (".", "artifacts", "bench", "cli", "serve")
CALLS = """
import json, statistics, sys, time
import torch
torch.set_num_threads(1)
import widepack
start = time.perf_counter()
ens = widepack.load(sys.argv[1])
load_s = time.perf_counter() - start
name = next(iter(ens.manifest.entries))
from widepack_bench.measure.inputs import make
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


def python(checkout: Path, *words: str) -> str:
    """Runs a Python command with the packages of a checkout and returns its standard output."""
    path = os.pathsep.join(str(checkout / package) for package in PACKAGES)
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.check_output([sys.executable, *words], env=environment, cwd=checkout, text=True)


def written(names: str, folder: Path) -> list[dict[str, Any]]:
    """Writes the checkpoints of rows of the suite. Returns what a build of each takes."""
    rows = []
    for row in chosen(names.split(",")):
        form, place = row.form("cpu"), folder / row.name
        place.mkdir()
        paths = write_checkpoints(
            partial(factory_of(row.model), **form.options), row.members, place, row.shared
        )
        given = {"model": row.model, "options": dict(form.options), "inputs": list(form.inputs)}
        rows.append({"name": row.name, "batch": row.batch, "paths": paths, **given})
    return rows


class Checkout:
    """One of the two checkouts. rows: of the suite. folder: of its artifacts. builds: rounds that build."""

    def __init__(self, path: Path, rows: Sequence[dict[str, Any]], folder: Path, builds: int) -> None:
        self.path, self._rows, self._folder, self._builds = path.resolve(), rows, folder, builds
        python(self.path, "-m", "compileall", "-q", "widepack", "artifacts", "bench", "cli", "serve")

    def measured(self, number: int) -> dict[str, float]:
        """Runs every measurement once and returns its seconds."""
        found: dict[str, float] = {}
        if number < self._builds:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir()
            for row in self._rows:
                out = python(self.path, "-c", BUILD, json.dumps(row), str(self._artifact(row)))
                found[f"build {row['name']}"] = float(out.splitlines()[-1])
        for words in (["--help"], ["inspect", str(self._artifact(self._rows[0]))]):
            start = time.perf_counter()
            python(self.path, "-m", "widepack_cli", *words)
            found[words[0]] = time.perf_counter() - start
        for row in self._rows:
            out = python(self.path, "-c", CALLS, str(self._artifact(row)), str(row["batch"]))
            seconds = json.loads(out.splitlines()[-1])
            found |= {f"{what} {row['name']}": value for what, value in seconds.items()}
        return found

    def _artifact(self, row: dict[str, Any]) -> Path:
        return self._folder / f"{row['name']}.wide"


def compared(old: Sequence[dict[str, float]], new: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Returns the medians in milliseconds of each measurement, and the ratio with its range."""
    rows = {}
    for name in old[0]:
        pairs = [(a[name], b[name]) for a, b in zip(old, new, strict=False) if name in a]
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


def measure(given: argparse.Namespace, folder: Path) -> None:
    """Runs all rounds. The first one fills caches."""
    given.again = True
    file, rows = file_of(given), written(given.rows, folder)
    sides = {
        name: Checkout(path, rows, folder / name, given.builds)
        for name, path in (("old", given.old), ("new", given.new))
    }
    head = ("rev-parse", "HEAD")
    file.document["commits"] = {
        name: subprocess.check_output(["git", "-C", str(side.path), *head], text=True).strip()
        for name, side in sides.items()
    }
    found: dict[str, list[dict[str, float]]] = {"old": [], "new": []}

    def once(name: str, number: int) -> None:
        seconds = sides[name].measured(number)
        if number >= 0:
            found[name].append(seconds)
        if min(map(len, found.values())) == number + 1 > 0:
            file.document["rows"] = compared(found["old"], found["new"])
            file.write()
            say(f"round {number + 1} of {given.rounds}")

    in_turns(list(sides), once, given.rounds)
    for key, row in file.rows.items():
        print(f"{key}: {row['old_ms']:.3f} ms, {row['new_ms']:.3f} ms, {row['ratio']:.3f} {row['range']}")


def main() -> None:
    options = parser(__doc__, "two-checkouts-cpu.json")
    options.add_argument("old", type=Path)
    options.add_argument("new", type=Path)
    options.add_argument("--rows", default="mlp-b1,conv-net,vit,bert,gru-8")
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--builds", type=int, default=3, help="rounds that build")
    given = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="widepack-checkouts-") as folder:
        measure(given, Path(folder))


if __name__ == "__main__":
    main()
