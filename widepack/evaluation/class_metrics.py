"""Computes how good probabilities of classes are. All figures are means over positions, in float64.

| figure | what it is | best |
|---|---|---|
| `accuracy` | the part of the positions whose most probable class is the target | 1 |
| `nll` | the mean of -log p of the target's class; p counts as at least 1e-12 | 0 |
| `brier` | the mean of the squared distance between p and 1 for the target, 0 for other classes | 0 |
| `ece` | the expected calibration error over 15 equal bins of the largest p (Naeini and others, 2015) | 0 |
| `error_auroc` | the AUROC of 1 - the largest p for finding wrong positions | 1 |
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..reduction.calibration import LEAST
from .ranks import auroc

BINS = 15


@dataclass(frozen=True)
class Bin:
    """A bin of a reliability diagram.

    least, most: its limits; a confidence counts where it is above `least` and at most `most`. count: its
    positions. confidence, accuracy: their means; 0 for an empty bin.
    """

    least: float
    most: float
    count: int
    confidence: float
    accuracy: float


def positions(values: Tensor) -> Tensor:
    """Returns [R, C, ...] as [P, C] in float64."""
    return values.double().movedim(1, -1).flatten(0, -2)


def reliability(p: Tensor, targets: Tensor, bins: int = BINS) -> list[Bin]:
    """Returns the bins of a reliability diagram. p: [P, C]; targets: [P]."""
    confidence, chosen = p.max(1)
    right = (chosen == targets).double()
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64)
    which = (torch.bucketize(confidence, edges) - 1).clamp(0, bins - 1)
    counts = torch.bincount(which, minlength=bins)
    sums = [torch.zeros(bins, dtype=torch.float64).index_add_(0, which, v) for v in (confidence, right)]
    means = [s / counts.clamp_min(1) for s in sums]
    return [
        Bin(float(edges[i]), float(edges[i + 1]), int(counts[i]), float(means[0][i]), float(means[1][i]))
        for i in range(bins)
    ]


def nll(p: Tensor, targets: Tensor) -> float:
    """Returns the mean of -log p of the target's class. p: [P, C]; targets: [P]."""
    return float(-p.gather(1, targets.unsqueeze(1)).clamp_min(LEAST).log().mean())


def figures(p: Tensor, targets: Tensor) -> dict[str, float | None]:
    """Returns the figures of one model. p: [P, C]; targets: [P]."""
    confidence, chosen = p.max(1)
    right = chosen == targets
    distance = p - torch.nn.functional.one_hot(targets, p.shape[1])
    apart = sum(b.count * abs(b.accuracy - b.confidence) for b in reliability(p, targets))
    return {
        "accuracy": float(right.double().mean()),
        "nll": nll(p, targets),
        "brier": float(distance.square().sum(1).mean()),
        "ece": apart / len(targets),
        "error_auroc": auroc(1 - confidence, ~right),
    }


def disagreement(chosen: Sequence[Tensor]) -> float:
    """Returns the part of the pairs of members that choose different classes, over all positions.

    chosen: the classes of each member, [P].
    """
    pairs = [float((a != b).double().mean()) for a, b in itertools.combinations(chosen, 2)]
    return sum(pairs) / len(pairs) if pairs else 0.0
