"""Measures fleets of fine-tunes against merged members: bytes, memory, and the time of calls.

    python scripts/measure/fleets.py -o bench/results/fleets-cpu.json
    python scripts/measure/fleets.py -o bench/results/fleets-tuned-cpu.json --tune 60 --fleet 768,1,8,8 \
        --fleet 768,1,32,8 --seconds 1

Each fleet is N LoRA adapters in all linear layers of an encoder. It is built twice: from the adapters, and
from checkpoints into which they were merged. Calls of both artifacts are interleaved in one process, on one
thread. Memory is read in fresh processes, after a load and a call of one row.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fleet_networks import options_of, write_fleet
from fleet_race import race
from torch import Tensor, nn

import widepack
from widepack_bench.report.environment import environment

MEMORY = """
import sys, torch, widepack
def smaps():
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        rows = dict(line.split(":", 1) for line in file if ":" in line)
    kb = {k: int(v.split()[0]) for k, v in rows.items() if v.split()[-1:] == ["kB"]}
    return kb["Rss"], kb["Private_Dirty"]
torch.set_num_threads(1)
torch.ones(64, 64) @ torch.ones(64, 64)
import widepack.inference.load
before = smaps()
ens = widepack.load(sys.argv[1], memory=sys.argv[3])
ens(torch.randn(1, 1, int(sys.argv[2])))
after = smaps()
print(after[0] - before[0], after[1] - before[1])
"""


def memory_of(path: Path, width: int, memory: str) -> dict[str, int]:
    """Returns by how many bytes a load and a call of one row let the process grow.

    The first process on a machine checks the artifact, for which torch imports its compiler. The later ones
    find in the user's cache that it passed.
    """
    grown = []
    with tempfile.TemporaryDirectory() as cache:
        for _ in range(2):
            found = subprocess.run(
                [sys.executable, "-c", MEMORY, str(path), str(width), memory],
                check=True,
                capture_output=True,
                text=True,
                env={**os.environ, "XDG_CACHE_HOME": cache},
            )
            grown.append([1024 * int(n) for n in found.stdout.split()])
    (first, first_private), (later, private) = grown
    return {
        "resident": later, "private_dirty": private,
        "first_resident": first, "first_private_dirty": first_private,
    }  # fmt: skip  # one line for each process


def by_groups(members: Sequence[nn.Module], x: Tensor, ids: Tensor) -> list[Any]:
    """Runs the rows of each member by the member alone."""
    return [member(x[ids == i]) for i, member in enumerate(members)]


def measured(
    sizes: tuple[int, int, int, int], rows: Sequence[tuple[int, int]], seconds: float, tune_s: float
) -> dict[str, Any]:
    """Returns the row of one fleet.

    sizes: width, layers, members, rank. rows: the sizes of the calls, (batch, tokens). tune_s: how long both
    artifacts are tuned; 0 for their plans as they are built.
    """
    width, layers, members, rank = sizes
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base, adapters, merged = write_fleet(folder, width, layers, members, rank)
        options = options_of(width, layers)
        thin, whole = folder / "fleet.wide", folder / "merged.wide"
        began = time.perf_counter()
        report = widepack.build(adapters, thin, base=base, **options)
        build_s = time.perf_counter() - began
        widepack.build(merged, whole, **options)
        for path in (thin, whole) if tune_s else ():
            widepack.tune(
                path,
                batches=(1, 4, 32),
                patterns=("shared",),
                budget_s=tune_s,
                total_s=tune_s,
                backends=["eager"],
                write=True,
            )
        result: dict[str, Any] = {
            "width": width,
            "layers": layers,
            "members": members,
            "rank": rank,
            "tune_s": tune_s,
            "build_s": build_s,
            "weights_bytes": {
                "fleet": sum(report.weights.values()),
                "merged": sum(w.bytes(members) for w in widepack.load(whole, warmup=False).manifest.weights),
            },
            "memory": {
                "fleet": memory_of(thin, width, "auto"),
                "fleet_least": memory_of(thin, width, "least"),
                "merged": memory_of(whole, width, "auto"),
            },
            "verification": {k: v for k, v in report.verification.items() if k in ("wide", "truth")},
            "calls": [],
        }
        ens, full = widepack.load(thin), widepack.load(whole)
        least = widepack.load(thin, memory="least")
        for batch, tokens in rows:
            x = torch.randn(batch, tokens, width)
            calls = {"fleet": partial(ens, x), "least": partial(least, x), "merged": partial(full, x)}
            scale = float(full(x).abs().max())
            difference = float((ens(x) - full(x)).abs().max()) / scale
            found = race(calls, seconds)
            result["calls"].append(
                {
                    "batch": batch, "tokens": tokens, "rows": batch * tokens, "difference": difference,
                    "ratio": found["merged"]["ms"] / found["fleet"]["ms"],
                    "cpu_ratio": found["merged"]["cpu_ms"] / found["fleet"]["cpu_ms"],
                    "ratio_least": found["merged"]["ms"] / found["least"]["ms"],
                    "times": found,
                }
            )  # fmt: skip
            print(width, members, batch, tokens, f"{result['calls'][-1]['ratio']:.2f}", file=sys.stderr)
        alone = [ens.member(i) for i in range(members)]
        ids = torch.arange(max(32, members)) % members
        for tokens in (1, 16):
            x = torch.randn(len(ids), tokens, width)
            calls = {
                "fleet": partial(ens.route, x, member=ids.tolist()),
                "merged": partial(full.route, x, member=ids.tolist()),
                "groups": partial(by_groups, alone, x, ids),
            }
            found = race(calls, seconds)
            result.setdefault("route", []).append({"batch": len(ids), "tokens": tokens, "times": found})
        return result


def main() -> None:
    """Measures all fleets and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each size of a call")
    parser.add_argument("--fleet", action="append", help="width,layers,members,rank; repeatable")
    parser.add_argument("--tune", type=float, default=0.0, help="seconds of tuning of each artifact")
    options = parser.parse_args()
    torch.set_num_threads(1)
    fleets = [tuple(map(int, f.split(","))) for f in options.fleet or ("768,2,8,8", "768,1,32,8")]
    sizes = ((1, 1), (1, 4), (1, 16), (4, 16), (8, 16), (32, 16))
    rows = []
    for width, layers, members, rank in fleets:
        rows.append(measured((width, layers, members, rank), sizes, options.seconds, options.tune))
        command = " ".join(["python scripts/measure/fleets.py", *sys.argv[1:]])
        document = {"command": command, "threads": 1, "environment": environment("cpu", 1), "rows": rows}
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
