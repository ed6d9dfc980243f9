"""Fits a calibration on one half of the rows, and measures it on the other half. In float64.

| kind | fitted number |
|---|---|
| `temperature` | the T of the least NLL of the ensemble's tempered probabilities |
| `variance` | the factor of the least NLL of the ensemble's normal distribution: mean(error^2 / variance) |

`widepack.reduction.calibration` has the formulas. The NLL is convex in 1 / T, so its slope has one zero,
which is found by bisection. A fitted number stays within the bounds that a record may have.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError
from ..reduction.calibration import BOUNDS, LEAST, TEMPERATURE, VARIANCE, tempered
from . import class_metrics, number_metrics

SEED = 0
"""The seed of the halves."""
_STEPS = 60  # of a bisection between the bounds: the rest is below the rounding of float64


def halves(rows: int) -> tuple[Tensor, Tensor]:
    """Returns the numbers of the rows to fit on, and of the others. Raises: UsageError for fewer than two."""
    if rows < 2:
        raise UsageError(
            "calibrate= fits on one half of the rows and measures on the other; give two at least"
        )
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(SEED))
    return order[: rows // 2], order[rows // 2 :]


def fitted_temperature(p: Tensor, targets: Tensor) -> float:
    """Returns the temperature of the least NLL. p: [P, C], in float64; targets: [P]."""
    scores = p.clamp_min(LEAST).log()
    own = float(scores.gather(1, targets.unsqueeze(1)).mean())

    def slope(beta: float) -> float:
        """Returns the derivative of the NLL by beta = 1 / T, which rises with beta."""
        return float(((scores * beta).softmax(1) * scores).sum(1).mean()) - own

    least, most = BOUNDS[TEMPERATURE]
    low, high = math.log(least), math.log(most)  # of T: the slope falls with it
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(math.exp(-middle)) > 0 else (low, middle)
    return min(max(math.exp((low + high) / 2), least), most)


def fitted_factor(mean: Tensor, variance: Tensor, targets: Tensor) -> float:
    """Returns the factor of the variance with the least NLL. All: [P], in float64."""
    least, most = BOUNDS[VARIANCE]
    best = float(((mean - targets).square() / variance.clamp_min(LEAST)).mean())
    return min(max(best, least), most)


def calibrated_classes(mean: Callable[[Tensor], Tensor], targets: Tensor) -> dict[str, Any]:
    """Fits a temperature.

    mean: returns the ensemble's probabilities of some rows, [P, C]. targets: [R, ...].

    Returns: the temperature, and the figures before and after it.
    """
    fit, others = halves(len(targets))
    value = fitted_temperature(mean(fit), targets[fit].flatten())
    p, truth = mean(others), targets[others].flatten()
    before, after = (
        {
            **class_metrics.figures(q, truth),
            "reliability": [asdict(b) for b in class_metrics.reliability(q, truth)],
        }
        for q in (p, tempered(p, value, 1))
    )
    return _report(TEMPERATURE, value, fit, others, before, after)


def calibrated_numbers(y: Tensor, targets: Tensor) -> dict[str, Any]:
    """Fits a factor of the variance. y: the members' numbers, [N, R, ...]; targets: [R, ...].

    Returns: the factor, and the figures before and after it. Raises: UsageError for one member.
    """
    if len(y) < 2:
        raise UsageError(
            "calibrate=: one member has no variance to calibrate; an ensemble of numbers has two"
        )
    fit, others = halves(len(targets))

    def of_rows(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        some = y[:, rows].flatten(1).double()
        return some.mean(0), some.var(0, correction=0), targets[rows].flatten().double()

    value = fitted_factor(*of_rows(fit))
    mean, variance, truth = of_rows(others)
    found = []
    for factor in (len(y) / (len(y) - 1), value):  # before: the variance as `evaluate` reports it, by N - 1
        figures, intervals = number_metrics.normal_figures(mean, variance * factor, truth)
        found.append({**figures, "intervals": [asdict(i) for i in intervals]})
    return _report(VARIANCE, value, fit, others, *found)


def _report(
    kind: str, value: float, fit: Tensor, others: Tensor, before: dict[str, Any], after: dict[str, Any]
) -> dict[str, Any]:
    return {
        "kind": kind,
        "value": value,
        "at_bound": value in BOUNDS[kind],
        "rows": len(fit),
        "held_out": len(others),
        "before": before,
        "after": after,
        "improves": after["nll"] < before["nll"],
    }
