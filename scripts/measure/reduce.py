#!/usr/bin/env python3
"""Measures `widepack.reduction` beside torch expressions over the whole tensor, and the errors of both.

    taskset -c 1 python scripts/measure/reduce.py [-o bench/results/reduce-cpu.json] [--seconds 4]

Each row is a tensor of answers [N, ...] and the figures mean, std, entropy and mutual information of its
softmax. `ratio` is the time of the expressions over the time of widepack, interleaved in one run, with its
95% interval; `noise` is widepack against itself. The error of a figure is the largest difference from
float64, as a share of the largest value of the figure; `error` is widepack's, `error_after` that of the
expressions.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from widepack.reduction.reduce import reduced
from widepack.reduction.request import requested
from widepack_bench.measure.processors import quiet
from widepack_bench.measure.race import OURS, race
from widepack_bench.report.environment import environment

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("mean", "std", "entropy", "mutual_information")
ROWS: tuple[tuple[tuple[int, ...], int], ...] = (
    ((16, 2, 8, 128, 128), 2),
    ((8, 1, 21, 128, 128), 2),
    ((16, 32, 1000), 2),
    ((100, 64, 10), 2),
    ((16, 32, 10), 2),
    ((8, 1, 10), 2),
)
AFTER = "expressions"


def after(answers: Tensor, dim: int) -> dict[str, Tensor]:
    """Returns the figures as a caller writes them over the whole tensor."""
    p = answers.softmax(dim)
    mean = p.mean(0)
    entropy = torch.special.entr(mean).sum(dim - 1)
    expected = torch.special.entr(p).sum(dim).mean(0)
    return {
        "mean": mean,
        "std": p.std(0, correction=0),
        "entropy": entropy,
        "mutual_information": (entropy - expected).clamp_min(0),
    }


def errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Returns the largest error of each figure."""
    return {
        name: float((found[name].double() - exact[name]).abs().max() / exact[name].abs().max())
        for name in NAMES
    }


def measure(shape: tuple[int, ...], dim: int, seconds: float) -> dict[str, Any]:
    """Measures one row. shape: of the answers. dim: of the classes."""
    torch.manual_seed(0)
    answers = torch.randn(shape) * 2
    wanted = requested(NAMES, "softmax", weighted=False)

    def ours() -> dict[str, Tensor]:
        return reduced(answers, wanted, "softmax", dim, None)

    exact = after(answers.double(), dim)
    run = race(ours, {AFTER: lambda: after(answers, dim)}, budget_s=seconds)
    return {
        "shape": list(shape),
        "dim": dim,
        "ms": run.median_ms(OURS),
        "after_ms": run.median_ms(AFTER),
        "ratio": run.ratio(AFTER).to_json(),
        "noise": run.noise.to_json(),
        "quiet": run.quiet,
        "error": errors(ours(), exact),
        "error_after": errors(after(answers, dim), exact),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--out", type=Path, default=ROOT / "bench" / "results" / "reduce-cpu.json")
    parser.add_argument("--seconds", type=float, default=4.0)
    options = parser.parse_args()
    with quiet(1), torch.inference_mode():
        rows = [measure(shape, dim, options.seconds) for shape, dim in ROWS]
        document = {
            "what": "mean, std, entropy and mutual information of softmax, over torch expressions",
            "environment": environment("cpu", 1),
            "rows": rows,
        }
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        print(row["shape"], f"{row['ms']:.3f} ms, {row['ratio']['value']:.2f}x", row["quiet"])


if __name__ == "__main__":
    main()
