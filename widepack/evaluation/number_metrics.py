"""Computes how good numbers are, and how far the spread of the members tells their error. In float64.

| figure | what it is | best |
|---|---|---|
| `rmse` | the root of the mean squared error | 0 |
| `mae` | the mean absolute error | 0 |
| `nll` | the mean of -log density of a normal distribution | |
| `error_rank` | Spearman's correlation of the deviation with the absolute error | 1 |

The last two are of the ensemble. Its normal distribution has the mean and the variance of the members. The
variance is divided by N - 1, and counts as at least 1e-12. The interval of a level is that of this
distribution, with the mean in its middle.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from torch import Tensor

from ..reduction.calibration import LEAST
from .ranks import rank_correlation

LEVELS = (0.5, 0.8, 0.9, 0.95)


@dataclass(frozen=True)
class Interval:
    """Intervals of one level. coverage: the part of the targets in them. width: their mean width."""

    level: float
    coverage: float
    width: float


def rmse(y: Tensor, targets: Tensor) -> float:
    """Returns the root of the mean squared error. y, targets: [P]."""
    return float((y.double() - targets.double()).square().mean().sqrt())


def figures(y: Tensor, targets: Tensor) -> dict[str, float | None]:
    """Returns the figures of one model. y, targets: [P]."""
    return {"rmse": rmse(y, targets), "mae": float((y.double() - targets.double()).abs().mean())}


def spread_figures(y: Tensor, targets: Tensor) -> tuple[dict[str, float | None], list[Interval]]:
    """Returns the figures of an ensemble that need its spread, and its intervals. y: [N, P]; targets: [P].

    Figures of one member are None, and it has no intervals.
    """
    if y.shape[0] < 2:
        return {"nll": None, "error_rank": None}, []
    return normal_figures(y.double().mean(0), y.double().var(0), targets.double())


def normal_figures(
    mean: Tensor, variance: Tensor, targets: Tensor
) -> tuple[dict[str, float | None], list[Interval]]:
    """Returns the figures of normal distributions, and their intervals. All: [P], in float64."""
    variance = variance.clamp_min(LEAST)
    error, deviation = (mean - targets).abs(), variance.sqrt()
    nll = 0.5 * ((2 * math.pi * variance).log() + error.square() / variance)
    intervals = []
    for level in LEVELS:
        half = NormalDist().inv_cdf(0.5 + level / 2) * deviation
        inside = (error <= half).double()
        intervals.append(Interval(level, float(inside.mean()), float(2 * half.mean())))
    return {"nll": float(nll.mean()), "error_rank": rank_correlation(deviation, error)}, intervals


def disagreement(y: Tensor) -> float:
    """Returns the mean deviation of the members from each other. y: [N, P]."""
    return float(y.double().std(0).mean()) if y.shape[0] > 1 else 0.0
