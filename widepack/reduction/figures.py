"""Defines the figures of an ensemble: how they are computed, and what they need.

The docstring of `Reductions.reduce` has the formulas. The names follow torch-uncertainty and Fortuna, except
for their words "aleatoric" and "epistemic", of which they give different definitions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .block import Sums


@dataclass(frozen=True)
class Figure:
    """One figure of an ensemble.

    Attributes:
        name: Its name in a request.
        compute: Computes it. The second argument is the number in parentheses, as in `quantile(0.9)`.
        reads: What it reads: names of properties of `Sums`.
        needs: `answers`, `real` answers, `probabilities`, or `votes`.
        classes: Whether the result has the dim of the classes.
        weighted: Whether members can have weights.
    """

    name: str
    compute: Callable[[Sums, float], torch.Tensor]
    reads: tuple[str, ...]
    needs: str = "answers"
    classes: bool = True
    weighted: bool = True

    @property
    def streamed(self) -> bool:
        """Whether it can be computed while members answer one after the other."""
        return "quantile" not in self.reads


def _vote(sums: Sums, _: float) -> torch.Tensor:
    if sums.of == "sigmoid":
        return (sums.counts * 2 > sums.total).long()
    return sums.counts.argmax(sums.dim)


def _mutual_information(sums: Sums, _: float) -> torch.Tensor:
    return (sums.entropy - sums.expected_entropy).clamp_min(0)


def _disagreement(sums: Sums, _: float) -> torch.Tensor:
    counts, members = sums.counts.to(sums.dtype), sums.members
    if sums.of == "sigmoid":
        same = counts * (counts - 1) + (members - counts) * (members - counts - 1)
    else:
        same = (counts * (counts - 1)).sum(sums.dim)
    return 1 - same / (members * (members - 1)) if members > 1 else torch.zeros_like(same)


def _variation_ratio(sums: Sums, _: float) -> torch.Tensor:
    counts = sums.counts.to(sums.dtype)
    if sums.of == "sigmoid":
        return 1 - torch.maximum(counts, sums.total - counts) / sums.total
    return 1 - counts.amax(sums.dim) / sums.total


_ALL = (
    Figure("mean", lambda s, _: s.mean, ("mean",)),
    Figure("var", lambda s, _: s.var, ("var",)),
    Figure("std", lambda s, _: s.var.sqrt(), ("var",)),
    Figure("min", lambda s, _: s.least, ("least",), "real", weighted=False),
    Figure("max", lambda s, _: s.greatest, ("greatest",), "real", weighted=False),
    Figure("median", lambda s, _: s.quantile(0.5), ("quantile",), "real", weighted=False),
    Figure("quantile", lambda s, q: s.quantile(q), ("quantile",), "real", weighted=False),
    Figure("vote", _vote, ("counts",), "votes", classes=False),
    Figure("votes", lambda s, _: s.counts, ("counts",), "votes"),
    Figure("entropy", lambda s, _: s.entropy, ("entropy",), "probabilities", classes=False),
    Figure(
        "expected_entropy",
        lambda s, _: s.expected_entropy,
        ("expected_entropy",),
        "probabilities",
        classes=False,
    ),
    Figure(
        "mutual_information",
        _mutual_information,
        ("entropy", "expected_entropy"),
        "probabilities",
        classes=False,
    ),
    Figure("disagreement", _disagreement, ("counts",), "votes", classes=False, weighted=False),
    Figure("variation_ratio", _variation_ratio, ("counts",), "votes", classes=False),
)

FIGURES = {figure.name: figure for figure in _ALL}
"""Every figure by its name. `mixture` reads two outputs, and is not among them."""
