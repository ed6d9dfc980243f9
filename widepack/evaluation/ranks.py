"""Computes ranks with ties, and what is made of them."""

from __future__ import annotations

import torch
from torch import Tensor


def ranks(values: Tensor) -> Tensor:
    """Returns the rank of each number from 1 on. Equal numbers have the mean of their ranks.

    Args:
        values: [P].

    Returns: [P], in float64.
    """
    _, which, counts = torch.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    mean: Tensor = last - (counts.double() - 1) / 2
    return mean[which]


def auroc(scores: Tensor, positive: Tensor) -> float | None:
    """Returns the probability that a positive has a larger score than a negative; ties count half.

    Args:
        scores: [P].
        positive: [P], booleans.

    Returns: None if there are no positives, or no negatives.
    """
    count, others = int(positive.sum()), int((~positive).sum())
    if not count or not others:
        return None
    above = ranks(scores)[positive].sum() - count * (count + 1) / 2
    return float(above / (count * others))


def rank_correlation(x: Tensor, y: Tensor) -> float | None:
    """Returns Spearman's rank correlation of two [P]; None if all numbers of one are equal."""
    a, b = (r - r.mean() for r in (ranks(x), ranks(y)))
    size = a.norm() * b.norm()
    return float((a * b).sum() / size) if size > 0 else None
