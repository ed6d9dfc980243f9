"""Defines the figures of an ensemble: their formulas, and what they need.

N members answer y_i. v_i is what a figure is computed of: the answers, or probabilities p_i of them. w_i are
the weights, which sum to 1; without weights each is 1/N. Entropies are in nats. The names follow
torch-uncertainty and Fortuna, but for their words "aleatoric" and "epistemic", of which they give different
definitions.
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
        formula: Its definition.
        compute: Computes it. The second argument is the number in parentheses, as in `quantile(0.9)`.
        reads: What it reads: names of properties of `Sums`.
        needs: `answers`, `real` answers, `probabilities`, or `votes`.
        classes: Whether the result has the dim of the classes.
        weighted: Whether members can have weights.
    """

    name: str
    formula: str
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
    Figure("mean", "sum_i w_i v_i", lambda s, _: s.mean, ("mean",)),
    Figure("var", "sum_i w_i |v_i - mean|^2 (divided by N, not by N - 1)", lambda s, _: s.var, ("var",)),
    Figure("std", "sqrt(var)", lambda s, _: s.var.sqrt(), ("var",)),
    Figure("min", "min_i v_i", lambda s, _: s.least, ("least",), "real", weighted=False),
    Figure("max", "max_i v_i", lambda s, _: s.greatest, ("greatest",), "real", weighted=False),
    Figure("median", "quantile(0.5)", lambda s, _: s.quantile(0.5), ("quantile",), "real", weighted=False),
    Figure(
        "quantile",
        "quantile(q): the value below which a share q of the members is, linear between two members",
        lambda s, q: s.quantile(q),
        ("quantile",),
        "real",
        weighted=False,
    ),
    Figure(
        "vote",
        "the class with the most votes, the lowest number if several have as many; a member votes for argmax "
        "y_i. With of='sigmoid', for each label: whether more than half of the members have p_i > 0.5",
        _vote,
        ("counts",),
        "votes",
        classes=False,
    ),
    Figure(
        "votes",
        "n_c: for each class the number of its votes, or the sum of their weights",
        lambda s, _: s.counts,
        ("counts",),
        "votes",
    ),
    Figure(
        "entropy",
        "H(sum_i w_i p_i), H(p) = -sum_c p_c log p_c: the entropy of the mean",
        lambda s, _: s.entropy,
        ("entropy",),
        "probabilities",
        classes=False,
    ),
    Figure(
        "expected_entropy",
        "sum_i w_i H(p_i): the mean of the members' entropies",
        lambda s, _: s.expected_entropy,
        ("expected_entropy",),
        "probabilities",
        classes=False,
    ),
    Figure(
        "mutual_information",
        "entropy - expected_entropy, at least 0: what the members disagree about (BALD)",
        _mutual_information,
        ("entropy", "expected_entropy"),
        "probabilities",
        classes=False,
    ),
    Figure(
        "disagreement",
        "1 - sum_c n_c (n_c - 1) / (N (N - 1)), n_c votes for class c: the share of pairs of members that "
        "choose different classes; 0 for one member",
        _disagreement,
        ("counts",),
        "votes",
        classes=False,
        weighted=False,
    ),
    Figure(
        "variation_ratio",
        "1 - max_c n_c / N: the share of members that do not choose the class with the most votes",
        _variation_ratio,
        ("counts",),
        "votes",
        classes=False,
    ),
)

FIGURES = {figure.name: figure for figure in _ALL}
"""Every figure by its name. `mixture` reads two outputs, and is not among them."""
