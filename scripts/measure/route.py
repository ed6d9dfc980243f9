#!/usr/bin/env python3
"""Measures `ens.route` beside what a service would write itself, for rows of several members.

    taskset -c 1 python scripts/measure/route.py [-o bench/results/route-cpu.json] [--seconds 2]

The baselines hold the members as modules: `dict` groups the rows by member and calls each module, `sorted`
sorts the rows once and calls each module on a slice, `vmap` gathers the weights of each row and calls one
module, `each` pads the rows to the largest group and runs all members. `ratio` is the time of the fastest
baseline over that of `route`, interleaved in one run, with its 95% interval; `noise` is `route` against
itself. Every baseline's answer is compared with `route`'s first.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from route_baselines import baseline_calls, gathered
from route_networks import NETWORKS, members_of
from route_race import raced

import widepack
from widepack_bench.measure.processors import quiet
from widepack_bench.report.environment import environment

ROOT = Path(__file__).resolve().parents[2]
BATCHES = (1, 8, 32, 128)
IDS = ("uniform", "zipf", "one")


def measure(name: str, folder: Path, seconds: float) -> list[dict[str, Any]]:
    """Measures all rows of a network."""
    make, count, shape = NETWORKS[name]
    modules, paths = [], []
    for i in range(count):
        torch.manual_seed(1 + i)
        modules.append(make().eval().requires_grad_(requires_grad=False))
        paths.append(folder / f"m{i}.pt")
        torch.save(modules[-1].state_dict(), paths[-1])
    spec = f"input=float32[B,{','.join(map(str, shape))}]"
    path = folder / "e.wide"
    widepack.build(paths, path, model=make, inputs=[spec], pt2=False, race=False, force=True)
    ens = widepack.load(path)
    vmapped = gathered(modules)
    found: list[dict[str, Any]] = []
    for batch in BATCHES:
        for kind in IDS:
            ids = members_of(kind, batch, count)
            if kind != "uniform" and batch == 1:
                continue
            x = torch.randn(batch, *shape, generator=torch.Generator().manual_seed(batch))
            calls = baseline_calls(ens, modules, vmapped, x, ids)
            row: dict[str, Any] = {"network": name, "members": count, "batch": batch, "ids": kind}
            row |= raced(ens, [x], ids, calls, seconds)
            found.append(row)
            print(
                name, batch, kind, f"{row['ms'] * 1e3:.0f} us, {row['ratio']['value']:.2f}x", row["fastest"]
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--out", type=Path, default=ROOT / "bench" / "results" / "route-cpu.json")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each row")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with quiet(1), torch.no_grad():
        for name in NETWORKS:
            with tempfile.TemporaryDirectory() as folder:
                rows += measure(name, Path(folder), options.seconds)
        document = {
            "what": "ens.route over the fastest of dict, sorted, vmap over gathered weights, and padded each",
            "environment": environment("cpu", 1),
            "rows": rows,
        }
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
