"""Computes the loss of an ensemble's mean predictions for each row. Smaller is better.

| metric | predictions | targets | loss of a row |
|---|---|---|---|
| `accuracy` | probabilities `[R, C, ...]` | classes `[R, ...]` | the part of its wrong positions |
| `log_loss` | probabilities `[R, C, ...]` | classes `[R, ...]` | the mean of -log p of the target |
| `squared_error` | numbers `[R, ...]` | numbers `[R, ...]` | the mean of the squared differences |
| `nll` | moments `[R, 2, ...]` | numbers `[R, ...]` | the mean of -log density of a normal distribution |

The normal distribution has the weighted mean and variance of the members. A variance counts as at least
1e-12. Means over members give both if they are of moments: of the numbers, and of their squares.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..reduction.calibration import LEAST

Loss = Callable[[Tensor, Tensor], Tensor]
"""Takes predictions and targets, and returns a number for each row, in float64."""


def error(predictions: Tensor, targets: Tensor) -> Tensor:
    """Returns for each row the part of its positions whose class is wrong."""
    return _rows((predictions.argmax(1) != targets).double())


def log_loss(predictions: Tensor, targets: Tensor) -> Tensor:
    """Returns for each row the mean of -log p of the target's class."""
    chosen = predictions.gather(1, targets.unsqueeze(1)).squeeze(1)
    return _rows(-chosen.double().clamp_min(LEAST).log())


def squared_error(predictions: Tensor, targets: Tensor) -> Tensor:
    """Returns for each row the mean of the squared differences."""
    return _rows((predictions.double() - targets.double()).square())


def moments(predictions: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns numbers and their squares, [N, R, 2, ...], and the targets: both less the mean of all members,
    so that the difference of squares does not cancel. predictions: [N, R, ...].
    """
    center = predictions.double().mean(0)
    apart = predictions.double() - center
    return torch.stack([apart, apart.square()], 2), targets.double() - center


def normal_nll(predictions: Tensor, targets: Tensor) -> Tensor:
    """Returns for each row the mean of -log density. predictions: means of moments, [R, 2, ...]."""
    mean, square = predictions.unbind(1)
    variance = (square - mean.square()).clamp_min(LEAST)
    return _rows(0.5 * ((2 * math.pi * variance).log() + (mean - targets).square() / variance))


def _rows(values: Tensor) -> Tensor:
    return values.flatten(1).mean(1) if values.ndim > 1 else values


METRICS: dict[str, tuple[Loss, ...]] = {
    "accuracy": (error, log_loss),
    "log_loss": (log_loss,),
    "squared_error": (squared_error,),
    "nll": (normal_nll,),
}
"""The losses of each metric. The second decides where the first is equal."""
OF_CLASSES = ("accuracy", "log_loss")
"""The metrics whose predictions are probabilities of classes."""


def score(metric: str, loss: float) -> float:
    """Returns the metric of a mean loss: the accuracy, or the loss itself."""
    return 1 - loss if metric == "accuracy" else loss


def means(losses: tuple[Loss, ...], predictions: Tensor, targets: Tensor) -> tuple[float, ...]:
    """Returns the mean of each loss over the rows."""
    with torch.no_grad():
        return tuple(float(loss(predictions, targets).mean()) for loss in losses)
