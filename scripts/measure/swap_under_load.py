#!/usr/bin/env python3
"""Measures calls of eight threads while members are swapped: whether all answers are consistent, and how long
the calls take.

    python scripts/measure/swap_under_load.py [-o bench/results/swap-cpu.json] [--calls 10000] [--threads 8]
    [--swaps 50] [--width 128]

N=8 members of a residual MLP, 14 layers deep, in an artifact built with `--share none`, backend `eager`,
torch on one thread. Each member has two versions, A and B. Two other artifacts, one of all A and one of all
B, give the expected answers to each of four inputs. So the answers after a swap are compared with those of a
model without swaps.

1. `--threads` threads make half of `--calls` calls at once, without swaps.
2. They make `--calls` calls, and `--swaps` swaps are spread evenly over them. One more thread swaps one
   member after the other, to B and back to A.
3. They make the other half of the calls without swaps.

| key | meaning |
|---|---|
| `torn` | answers of a member that are equal, bit for bit, to neither A's nor B's; must be 0 |
| `mixtures` | different sets of versions among the answers; more than one shows calls between swaps |
| `p99_ms` | 99th percentile of the calls' times, without and with swaps |
| `pause_ms`, `wait_ms`, `copy_ms` | times of a swap: calls stop; it waits for calls; it copies |
| `holds` | no answer is torn, and p99 with swaps is at most 1.5x the p99 without, plus the median copy |
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from swap_load import Load, percentile, spread
from torch import Tensor, nn

import widepack
from widepack_bench.report.environment import environment

ROOT = Path(__file__).resolve().parents[2]
MEMBERS, LAYERS, BATCH, INPUTS = 8, 14, 8, 4


class Residual(nn.Module):
    """A sequence of norms and layers. A torn read of any weight changes every answer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(LAYERS))
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(LAYERS))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers):
            x = x + torch.tanh(layer(norm(x)))
        return self.head(x)  # type: ignore[no-any-return]


def checkpoints(folder: Path, width: int) -> dict[str, list[Path]]:
    """Builds both versions of every member."""
    paths: dict[str, list[Path]] = {"A": [], "B": []}
    for v, version in enumerate(paths):
        for i in range(MEMBERS):
            torch.manual_seed(100 * v + i)
            path = folder / f"{version}{i}.pt"
            torch.save(Residual(width).state_dict(), path)
            paths[version].append(path)
    return paths


def built(folder: Path, version: str, paths: list[Path], width: int, device: str = "cpu") -> Path:
    """Builds the artifact of one version of all members."""
    options: dict[str, Any] = {
        "inputs": [f"x=float32[B,{width}]"],
        "targets": (torch.device(device).type,),
        "pt2": False,
        "share": "none",
    }
    widepack.build(paths, folder / f"{version}.wide", model=partial(Residual, width), **options)
    return folder / f"{version}.wide"


def swapping(
    ens: widepack.WideModel,
    paths: dict[str, list[Path]],
    swaps: int,
    load: Load,
    calls: int,
    stop: Callable[[], bool],
) -> list[Any]:
    """Swaps one member after the other, evenly over the calls."""
    reports = []
    begun = load.done
    for k in range(swaps):
        while load.done - begun < (k + 0.5) * calls / swaps and not stop():
            time.sleep(0.0005)
        version = "B" if (k // MEMBERS) % 2 == 0 else "A"
        reports.append(ens.swap(k % MEMBERS, paths[version][k % MEMBERS]))
    return reports


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-o", "--out", type=Path, default=ROOT / "bench/results/swap-cpu.json")
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--swaps", type=int, default=50)
    parser.add_argument("--width", type=int, default=128)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        paths = checkpoints(place, given.width)
        inputs = [
            torch.randn(BATCH, given.width, generator=torch.Generator().manual_seed(i)) for i in range(INPUTS)
        ]
        artifacts = {version: built(place, version, rows, given.width) for version, rows in paths.items()}
        known = [
            [ens(x) for x in inputs]
            for ens in (widepack.load(a, backend="eager") for a in artifacts.values())
        ]
        ens = widepack.load(artifacts["A"], backend="eager")
        load = Load(ens, inputs, known, given.threads)
        load.run(max(given.threads, given.calls // 10))  # warm-up
        ens.swap(0, paths["B"][0])
        ens.swap(0, paths["A"][0])
        without = [call.seconds for call in load.run(given.calls // 2)]
        reports: list[Any] = []
        ended = threading.Event()
        swapper = threading.Thread(
            target=lambda: reports.extend(swapping(ens, paths, given.swaps, load, given.calls, ended.is_set))
        )
        swapper.start()
        during = [call.seconds for call in load.run(given.calls)]
        ended.set()
        swapper.join()
        without += [call.seconds for call in load.run(given.calls // 2)]
    copy = median(1000 * r.seconds["copy"] for r in reports)
    p99 = {"without": percentile(without, 0.99), "with": percentile(during, 0.99)}
    record = {
        "what": __doc__,
        "environment": environment("cpu", 1),
        "members": MEMBERS,
        "layers": LAYERS,
        "width": given.width,
        "batch": BATCH,
        "threads": given.threads,
        "calls": len(during),
        "swaps": len(reports),
        "bytes_a_swap": reports[0].bytes,
        "torn": load.torn,
        "mixtures": len(load.mixtures),
        "calls_ms": {"without": spread(without), "with": spread(during)},
        "p99_ms": p99,
        "pause_ms": spread([r.pause for r in reports]),
        "wait_ms": spread([r.seconds["wait"] for r in reports]),
        "copy_ms": spread([r.seconds["copy"] for r in reports]),
        "aside_ms": {
            stage: 1000 * median(r.seconds[stage] for r in reports)
            for stage in ("open", "check", "derive", "verify")
        },
        "ratio": (p99["with"] - copy) / p99["without"],
        "holds": load.torn == 0
        and len(reports) == given.swaps
        and p99["with"] <= 1.5 * p99["without"] + copy,
    }
    given.out.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    print(
        f"{len(during):,} calls of {given.threads} threads during {len(reports)} swaps: "
        f"{load.torn} torn, {len(load.mixtures)} mixtures; p99 {p99['with']:.1f} ms with swaps, "
        f"{p99['without']:.1f} without ({record['ratio']:.2f}x beyond a copy of {copy:.2f} ms)"
    )


if __name__ == "__main__":
    main()
