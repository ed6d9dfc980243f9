"""Measures `widepack.reduction` beside torch expressions over the whole tensor, and the errors of both.

    taskset -c 1 python scripts/measure/reduce.py

Each row is a tensor of answers [N, ...], reduced to mean, std, entropy and mutual information of its softmax.
`ratio` is the time of the expressions over the time of widepack, interleaved in one run, with its 95%
interval; `noise` is widepack against itself. An error is the largest difference from float64, as a share of
the largest value; `errors` are widepack's, `errors_after` those of the expressions.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from runner import parser, run
from torch import Tensor

from widepack.reduction.figures import requested
from widepack.reduction.reduce import reduced
from widepack_bench.measure.processors import quiet
from widepack_bench.measure.race import OURS, race

NAMES = ("mean", "std", "entropy", "mutual_information")
SHAPES = (
    (16, 2, 8, 128, 128),
    (8, 1, 21, 128, 128),
    (16, 32, 1000),
    (100, 64, 10),
    (16, 32, 10),
    (8, 1, 10),
)
DIM = 2  # of the classes


def expressions(answers: Tensor) -> dict[str, Tensor]:
    """Returns the reductions as a caller writes them over the whole tensor."""
    p = answers.softmax(DIM)
    mean = p.mean(0)
    entropy = torch.special.entr(mean).sum(DIM - 1)
    expected = torch.special.entr(p).sum(DIM).mean(0)
    information = (entropy - expected).clamp_min(0)
    return {
        "mean": mean,
        "std": p.std(0, correction=0),
        "entropy": entropy,
        "mutual_information": information,
    }


def measured(shape: tuple[int, ...], seconds: float) -> dict[str, Any]:
    torch.manual_seed(0)
    answers = torch.randn(shape) * 2
    ours = partial(reduced, answers, requested(NAMES, "softmax", weighted=False), "softmax", DIM, None)
    after, exact = partial(expressions, answers), expressions(answers.double())
    found = race(ours, {"expressions": after}, budget_s=seconds)

    def errors(values: dict[str, Tensor]) -> dict[str, float]:
        return {n: float((values[n].double() - e).abs().max() / e.abs().max()) for n, e in exact.items()}

    return {
        "shape": list(shape),
        "dim": DIM,
        "ms": found.median_ms(OURS),
        "after_ms": found.median_ms("expressions"),
        "ratio": found.ratio("expressions").to_json(),
        "noise": found.noise.to_json(),
        "quiet": found.quiet,
        "errors": errors(ours()),
        "errors_after": errors(after()),
    }


if __name__ == "__main__":
    given = parser(__doc__, "reduce-cpu.json", seconds=4.0).parse_args()
    with quiet(1), torch.inference_mode():
        sys.exit(run(given, {str(shape): partial(measured, shape, given.seconds) for shape in SHAPES}))
