#!/usr/bin/env python3
"""Measures calls of a fleet while adapters are swapped and appended: whether all answers are consistent, and
how long calls wait.

    python scripts/measure/fleet_swap_under_load.py [-o bench/results/fleets-swap-cpu.json] [--calls 2000]
    [--threads 8] [--fleet width,layers,members,rank]

The members are LoRA adapters in all linear layers of an encoder. Each has two versions, A and B. The
artifact is built of A, and loaded with backend `eager`, torch on one thread. Each call has one row of one
token for all members.

1. Without load, all members are swapped to B and to A. The answers after each are the expected ones. Those of
   the first and the last member are compared with the merged member in float64.
2. `--threads` threads make `--calls` calls: half of them before the swaps, and half of them after. Meanwhile
   one more thread swaps all members, one after the other, to B and back to A.
3. The threads call again, and another process runs `widepack append` with one more adapter. Then this process
   loads the new artifact beside the old one and calls it once. From then on, the threads call the new one.

| key | meaning |
|---|---|
| `error` | the largest difference from float64, over the largest number in the answer |
| `torn` | answers of a member that are equal, bit for bit, to none of the expected ones; must be 0 |
| `mixtures` | different sets of versions among the answers; more than one shows calls between swaps |
| `calls_ms` | times of calls without a change, during swaps, during an append, and during a load |
| `pause_ms`, `wait_ms`, `copy_ms` | times of a swap: calls stop; it waits for calls; it copies |
| `aside_ms` | median times of the stages of a swap during which calls go on |
| `append.seconds` | of the append, and of the load of the new artifact with its first call |
| `append.gap_ms` | the longest time in which no call ended |
| `holds` | no answer is torn, all swaps were made, and the errors are those of float32 |
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from fleet_networks import Encoder, merged_state, options_of, write_adapter, write_base
from swap_load import Call, Load, longest_gap, spread
from torch import Tensor

import widepack
from widepack_bench.report.environment import environment

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = ("A", "B")
INPUTS = 4
MOST = 1e-5
"""The largest `error` of float32."""


@dataclass(frozen=True)
class Versions:
    """The files of a fleet.

    base: the checkpoint of the base. adapters: by version, the folder of each member. more: one more adapter.
    merged: by version, the state dicts of the first and the last member.
    """

    base: Path
    adapters: dict[str, list[Path]]
    more: Path
    merged: dict[str, list[dict[str, Tensor]]]


class Served:
    """The model that is called. It may be exchanged while calls go on."""

    def __init__(self, ens: widepack.WideModel) -> None:
        self.ens = ens

    def __call__(self, x: Tensor) -> Tensor:
        found: Tensor = self.ens(x)
        return found


def written(folder: Path, width: int, layers: int, members: int, rank: int) -> Versions:
    """Writes the base, and both versions of each member."""
    base = write_base(folder / "base.pt", width, layers)
    adapters: dict[str, list[Path]] = {}
    merged: dict[str, list[dict[str, Tensor]]] = {}
    for v, version in enumerate(VERSIONS):
        adapters[version], merged[version] = [], []
        for i in range(members):
            adapters[version].append(folder / f"{version}{i:02}")
            differences = write_adapter(adapters[version][-1], base, rank, 1 + i + 1000 * v)
            if i in (0, members - 1):
                merged[version].append(merged_state(base, differences))
    write_adapter(folder / "more", base, rank, 5000)
    return Versions(folder / "base.pt", adapters, folder / "more", merged)


def swap_all(ens: widepack.WideModel, adapters: Sequence[Path]) -> list[widepack.SwapReport]:
    """Swaps all members, one after the other."""
    return [ens.swap(i, path) for i, path in enumerate(adapters)]


def error_of(state: dict[str, Tensor], answer: Tensor, x: Tensor, width: int, layers: int) -> float:
    """Returns the largest relative difference of a member's answer from float64."""
    member = Encoder(width, layers).double()
    member.load_state_dict(state)
    with torch.inference_mode():
        right = member(x.double())
    return float((answer.double() - right).abs().max() / right.abs().max())


def seconds_of(calls: Sequence[Call]) -> dict[str, float]:
    return spread([call.seconds for call in calls])


def appended(served: Served, load: Load, path: Path, more: Path) -> dict[str, Any]:
    """Appends an adapter in another process and changes to the new artifact, while the threads call.

    Returns:
        The seconds of the append and of the load, and the times of the calls during each.
    """
    next_path = path.with_name("next.wide")
    command = [sys.executable, "-m", "widepack_cli", "append", str(path), str(more), "-o", str(next_path)]
    marks = []

    def change() -> None:
        marks.append(time.perf_counter())
        subprocess.run(command, check=True, capture_output=True)
        marks.append(time.perf_counter())
        ens = widepack.load(next_path, backend="eager")
        load.known = [*load.known, [ens(x) for x in load.inputs]]
        marks.append(time.perf_counter())
        served.ens = ens

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(change)
        during = load.run_until(future.done)
        future.result()
    old, new = load.known[0][0], load.known[-1][0]
    during += load.run(20 * load.threads)  # of the new artifact
    begin, between, end = marks
    return {
        "seconds": {"append": between - begin, "load": end - between},
        "calls_ms": {
            "append": seconds_of([c for c in during if c.begin < between]),
            "load": seconds_of([c for c in during if between <= c.begin < end]),
            "after": seconds_of([c for c in during if c.begin >= end]),
        },
        "gap_ms": 1000 * longest_gap([c for c in during if begin <= c.begin < end]),
        "members": len(new),
        "difference": float((new[: len(old)] - old).abs().max() / old.abs().max()),
    }


def measured(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Returns the figures of a fleet."""
    width, layers, members, rank = map(int, given.fleet.split(","))
    files = written(folder, width, layers, members, rank)
    path = folder / "fleet.wide"
    widepack.build(files.adapters["A"], path, base=files.base, **options_of(width, layers))
    ens = widepack.load(path, backend="eager")
    inputs = [torch.randn(1, 1, width, generator=torch.Generator().manual_seed(i)) for i in range(INPUTS)]
    known: dict[str, list[Tensor]] = {}
    for version in ("B", "A"):  # A last: it is loaded when the calls begin
        swap_all(ens, files.adapters[version])
        known[version] = [ens(x) for x in inputs]
    error = max(
        error_of(state, known[version][0][i], inputs[0], width, layers)
        for version in VERSIONS
        for i, state in zip((0, members - 1), files.merged[version])
    )
    served = Served(ens)
    load = Load(served, inputs, [known[v] for v in VERSIONS], given.threads, at_once=True)
    load.run(max(given.threads, given.calls // 10))  # warm-up
    without = load.run(given.calls // 2)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(lambda: [r for v in ("B", "A") for r in swap_all(ens, files.adapters[v])])
        during = load.run_until(future.done)
        reports = future.result()
    without += load.run(given.calls // 2)
    more = appended(served, load, path, files.more)
    return {
        "width": width, "layers": layers, "members": members, "rank": rank, "threads": given.threads,
        "calls": len(during), "swaps": len(reports), "bytes_a_swap": reports[0].bytes, "error": error,
        "torn": load.torn,
        "mixtures": len(load.mixtures),
        "calls_ms": {"without": seconds_of(without), "swaps": seconds_of(during)},
        "gap_ms": {"without": 1000 * longest_gap(without[: given.calls // 2]),
                   "swaps": 1000 * longest_gap(during)},
        "pause_ms": spread([r.pause for r in reports]),
        "wait_ms": spread([r.seconds["wait"] for r in reports]),
        "copy_ms": spread([r.seconds["copy"] for r in reports]),
        "aside_ms": {
            stage: 1000 * median(r.seconds[stage] for r in reports)
            for stage in ("open", "check", "derive", "verify")
        },
        "append": more,
        "holds": load.torn == 0 and len(reports) == 2 * members
        and error <= MOST and more["difference"] <= MOST,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-o", "--out", type=Path, default=ROOT / "bench/results/fleets-swap-cpu.json")
    parser.add_argument("--calls", type=int, default=2000, help="without a change of members")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--fleet", default="768,2,32,8", help="width,layers,members,rank")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = measured(given, Path(folder))
    record = {"what": __doc__, "environment": environment("cpu", 1), **found}
    given.out.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    print(
        f"{found['calls']:,} calls of {given.threads} threads during {found['swaps']} swaps: "
        f"{found['torn']} torn, {found['mixtures']} mixtures; pause {found['pause_ms']['p50']:.2f} ms; "
        f"append {found['append']['seconds']['append']:.1f} s, "
        f"longest gap {found['append']['gap_ms']:.1f} ms"
    )


if __name__ == "__main__":
    main()
