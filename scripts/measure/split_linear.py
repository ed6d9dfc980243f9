#!/usr/bin/env python3
"""Measures the op `widepack::delta_linear`: linear layers over a base of all members and thin factors.

    python scripts/measure/split_linear.py [-o bench/results/split-linear-cpu.json] [--seconds 1.0]

Each row is one shape: N members, R rows of each, I inputs, O outputs, rank r, float32. `split` is the op,
`apart` the same products as separate ops of torch. `turned`, `streamed` and `packed` are the strategies of
linear layers over merged weights, which are N times as large. The script uses one thread, pinned to one core.
The forms run in a new random order in each round, and are compared by the CPU time of the thread: `ms` is the
median. `ratio` is the time of the fastest form over merged weights divided by that of `split`. Before the
timing, all answers are compared with each other.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from widepack.ir import ops as ops  # defines widepack's own ops
from widepack.kernels.library import FUNCTIONS
from widepack_bench.measure.processors import quiet
from widepack_bench.report.environment import environment

ROOT = Path(__file__).resolve().parents[2]
SHAPES = [
    (members, rows, size, size, rank)
    for size, rank in ((768, 8), (768, 96), (256, 8), (256, 16))
    for members in (8, 32)
    for rows in ((1, 4, 16, 64, 128, 512, 2048) if members == 8 else (1, 4, 16, 64, 128, 512))
]
MERGED = ("turned", "streamed", "packed")


def forms(members: int, rows: int, inputs: int, outputs: int, rank: int) -> dict[str, Callable[[], Tensor]]:
    """Returns the forms of one layer, by name."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    x, base, bias = drawn(members, rows, inputs), drawn(outputs, inputs), drawn(members, outputs)
    left, right = drawn(members, outputs, rank), drawn(members, rank, inputs)
    weight = base + left @ right
    matrix = weight.transpose(1, 2).contiguous()
    packed = FUNCTIONS["widepack.pack_linear.default"](weight, rows)
    added, thin, turned = bias.unsqueeze(1), right.transpose(1, 2), left.transpose(1, 2)
    return {
        "split": lambda: FUNCTIONS["widepack.delta_linear.default"](x, base, left, right, bias),
        "apart": lambda: torch.baddbmm(
            torch.nn.functional.linear(x, base) + added, torch.bmm(x, thin), turned
        ),
        "turned": lambda: torch.baddbmm(added, x, matrix),
        "streamed": lambda: FUNCTIONS["widepack.streamed_linear.default"](x, matrix, bias),
        "packed": lambda: FUNCTIONS["widepack.linear.default"](x, packed, bias),
    }


def measured(shape: tuple[int, int, int, int, int], seconds: float) -> dict[str, Any]:
    """Returns the row of one shape."""
    found = forms(*shape)
    answers = {name: form() for name, form in found.items()}
    scale = float(answers["turned"].abs().max())
    for answer in answers.values():
        torch.testing.assert_close(answer, answers["turned"], rtol=0, atol=1e-4 * scale)
    times: dict[str, list[float]] = {name: [] for name in found}
    order, end, rounds = list(found), time.perf_counter() + seconds, 0
    draw = random.Random(0)
    while rounds < 5 or time.perf_counter() < end:
        draw.shuffle(order)
        for name in order:
            start = time.thread_time()
            found[name]()
            times[name].append(time.thread_time() - start)
        rounds += 1
    ms = {name: round(1e3 * statistics.median(t), 4) for name, t in times.items()}
    ratio = min(ms[name] for name in MERGED) / ms["split"]
    names = ("members", "rows", "inputs", "outputs", "rank")
    return {**dict(zip(names, shape)), "rounds": rounds, "ms": ms, "ratio": round(ratio, 3)}


def main() -> None:
    """Measures all shapes and writes the document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "-o", "--out", type=Path, default=ROOT / "bench" / "results" / "split-linear-cpu.json"
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="for each shape")
    options = parser.parse_args()
    with quiet(1, pin=True), torch.inference_mode():
        rows = []
        for shape in SHAPES:
            rows.append(measured(shape, options.seconds))
            print(json.dumps(rows[-1]), flush=True)
        document = {
            "what": "split_linear: layers over a base and thin factors, against merged weights",
            "environment": environment("cpu", 1),
            "rows": rows,
        }
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
