"""Measures mixtures of experts: products by expert, beside the form that copies a matrix for each row.

    taskset -c 1 python scripts/measure/experts.py [-o bench/results/experts-cpu.json] [--seconds 2]

A member is a router and 32 experts of two linear layers, of which each row uses two. `experts` is the
artifact as it is built, `copied` the same with the strategy `experts` taken out, and `loop` the torch modules
one after the other. The calls are interleaved, on one thread. Answers are compared with the modules'.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import widepack
from widepack.registry.registry import REGISTRY
from widepack_bench.report.environment import environment

ROOT = Path(__file__).resolve().parents[2]
EXPERTS, ACTIVE, ROWS = 32, 2, 64


class Mixture(nn.Module):
    """A mixture of experts that reads a matrix for each row."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * width, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, width, 2 * width) / (2 * width) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(-1).topk(ACTIVE)
        h = torch.nn.functional.gelu(torch.einsum("bkoi,bi->bko", self.up[chosen], x))
        y = torch.einsum("bkoi,bki->bko", self.down[chosen], h)
        found: Tensor = x + (weight.unsqueeze(-1) * y).sum(1)
        return found


def measured(folder: Path, width: int, members: int, seconds: float) -> dict[str, Any]:
    """Returns the times of one width and number of members."""
    nets, paths = [], []
    for i in range(members):
        torch.manual_seed(i)
        nets.append(Mixture(width).eval())
        paths.append(folder / f"m{i:02}.pt")
        torch.save(nets[-1].state_dict(), paths[-1])
    out = folder / "experts.wide"
    inputs = [f"x=float32[B,{width}]"]
    widepack.build(paths, out, model=lambda: Mixture(width), inputs=inputs, race=False, pt2=False, force=True)
    ens = widepack.load(out)
    op = REGISTRY["aten.einsum.default"].strategies
    taken = op.pop("experts")
    copied = widepack.load(out, strategies="wide", warmup=True)
    op["experts"] = taken
    x = torch.randn(ROWS, width)

    def loop() -> list[Tensor]:
        with torch.inference_mode():
            return [net(x) for net in nets]

    calls: dict[str, Callable[[], Any]] = {
        "experts": lambda: ens(x), "copied": lambda: copied(x), "loop": loop
    }  # fmt: skip  # one line
    differences = [float((a - b).abs().max()) for a, b in zip(ens(x), loop())]
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    end, rounds = time.perf_counter() + seconds, 0
    while rounds < 9 or time.perf_counter() < end:
        for name in list(calls)[rounds % 3 :] + list(calls)[: rounds % 3]:
            start = time.thread_time()
            calls[name]()
            times[name].append(1000 * (time.thread_time() - start))
        rounds += 1
    ms = {name: statistics.median(found) for name, found in times.items()}
    return {
        "width": width, "members": members, "rounds": rounds, "ms": ms,
        "over_copied": ms["copied"] / ms["experts"], "over_loop": ms["loop"] / ms["experts"],
        "difference": max(differences),
    }  # fmt: skip  # one line for each kind


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--out", type=Path, default=ROOT / "bench" / "results" / "experts-cpu.json")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each row")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for width in (64, 256):
            for members in (4, 16):
                rows.append(measured(Path(folder), width, members, options.seconds))
                print(json.dumps(rows[-1]), flush=True)
    document = {
        "what": f"mixtures of {EXPERTS} experts, {ACTIVE} active, {ROWS} rows",
        "environment": environment("cpu", 1),
        "rows": rows,
    }
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
