#!/usr/bin/env python3
"""Measures training after members were removed from a fused module.

    taskset -c 0 python scripts/measure/removed_members.py [-o bench/results/removed-members-cpu.json]

N=8 members, one thread, AdamW of `widepack.optim` with a rate for each member. A step is a forward pass, a
backward pass and the optimizer's step. Times are of the processor, so that other load on the machine counts
little.

| figure | what it is |
|---|---|
| `fuse_s` | seconds of `fuse` in train mode and of the first step: capture, lowering, comparison |
| `remove_s` | seconds of `remove` alone |
| `first_step_s` | seconds of the first step after it: lowering for fewer members, comparison |
| `ratio` | the step of the members that are left, by the step of all 8: steps alternate, median over rounds |

The seconds are measured with the comparison (`validate=True`) and without it.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import widepack
from widepack_bench.measure.processors import quiet
from widepack_bench.measure.race import median_interval
from widepack_bench.report.environment import environment

ROOT = Path(__file__).resolve().parents[2]
MEMBERS = 8
REMOVED = (1, 2, 4, 6, 7)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "MLP 64-256-256-10, batch 64": (mlp, torch.randn(64, 64)),
    "conv net, 3 layers, 3x16x16, batch 32": (conv_net, torch.randn(32, 3, 16, 16)),
}


def optimizer_of(fused: widepack.Fused) -> torch.optim.Optimizer:
    return widepack.optim.AdamW(fused.parameters(), lr=[1e-3 * (i + 1) for i in range(len(fused))])


def step(fused: widepack.Fused, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    fused(x).square().mean((1, 2)).sum().backward()
    optimizer.step()


def timed(call: Callable[[], Any]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def program_seconds(make: Callable[[], nn.Module], x: Tensor, validate: bool) -> dict[str, float]:
    """Measures the first steps of a fused module, and of what is left after one member was removed."""
    start = time.process_time()
    fused = widepack.fuse([make().train() for _ in range(MEMBERS)], x, validate=validate)
    optimizer = optimizer_of(fused)
    step(fused, optimizer, x)
    fuse_s = time.process_time() - start
    remove_s = timed(lambda: fused.remove(3, optimizer=optimizer))
    return {"fuse_s": fuse_s, "remove_s": remove_s, "first_step_s": timed(lambda: step(fused, optimizer, x))}


def step_ratios(make: Callable[[], nn.Module], x: Tensor, seconds: float) -> dict[str, Any]:
    """Measures steps of all members and of what is left, in turn."""
    whole = widepack.fuse([make().train() for _ in range(MEMBERS)], x, validate=False)
    modules = {0: whole, **{k: copy.deepcopy(whole) for k in REMOVED}}
    optimizers = {k: optimizer_of(m) for k, m in modules.items()}
    for k, module in modules.items():
        for _ in range(3):
            step(module, optimizers[k], x)
        module.remove(*range(k), optimizer=optimizers[k])
        for _ in range(3):
            step(module, optimizers[k], x)
    rounds: list[dict[int, float]] = []
    end = time.process_time() + seconds
    while len(rounds) < 20 or time.process_time() < end:
        times = {k: timed(lambda k=k: step(modules[k], optimizers[k], x)) for k in modules}  # type: ignore[misc]
        rounds.append(times)
    return {
        f"{k} of {MEMBERS} removed": {
            "step_ms": 1e3 * statistics.median(r[k] for r in rounds),
            "ratio": median_interval([r[k] / r[0] for r in rounds]).to_json(),
            "members_ratio": (MEMBERS - k) / MEMBERS,
        }
        for k in modules
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-o", "--out", type=Path, default=ROOT / "bench/results/removed-members-cpu.json")
    parser.add_argument("--seconds", type=float, default=10, help="seconds of steps for each network")
    given = parser.parse_args()
    results: dict[str, Any] = {}
    with quiet(1, pin=False):
        for name, (make, x) in NETWORKS.items():
            program_seconds(make, x, True)  # imports
            results[name] = {
                "validated": program_seconds(make, x, True),
                "not_validated": program_seconds(make, x, False),
                "steps": step_ratios(make, x, given.seconds),
            }
            print(name, json.dumps(results[name], indent=1))
    record = {
        "what": __doc__,
        "environment": environment("cpu", 1),
        "members": MEMBERS,
        "networks": results,
    }
    given.out.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
