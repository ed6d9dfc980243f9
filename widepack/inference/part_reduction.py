"""Sums up the answers of some of the members of a model, for figures of all of them.

A model over several devices or processes moves these sums instead of the answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from widepack_artifacts.entry import OutputLeaf

from ..reduction.partial import add_answers
from ..reduction.request import Requested, requested
from ..reduction.stream import StreamedSums
from .reduced_answer import MIXTURE, Reduction, means_and_variances

FIGURES, MEANS, VARIANCES = "figures", "means", "variances"
"""The names of the sums: of the leaf of the figures, and of the two leaves of `mixture`."""
Sums = dict[str, StreamedSums]


@dataclass(frozen=True)
class PartReduction(Reduction):
    """A reduction of which adjacent members answer here.

    Attributes:
        first: The number of the first of them.
        total: N of the whole model.
    """

    first: int = 0
    total: int = 0

    @classmethod
    def part_of(cls, reduction: Reduction, first: int, total: int) -> PartReduction:
        """Returns the part of a reduction."""
        given = {f.name: getattr(reduction, f.name) for f in fields(Reduction)}
        return cls(**given, first=first, total=total)

    def shares(self, answer: Tensor, members: int) -> dict[int, float]:
        """Returns the weight of each member that counts, by its number here. members: how many are here."""
        every = super().shares(answer, self.total)
        return {n: every[self.first + n] for n in range(members) if self.first + n in every}

    def of_answer(self, answer: Any, leaves: Sequence[OutputLeaf]) -> Sums:
        """Returns the sums of an answer, in which every leaf is a tensor `[n, ...]`.

        leaves: the outputs in the manifest. Raises: InputError, UsageError.
        """
        found: Sums = {}
        if self.wanted:
            values = self.leaf(answer, leaves, False)
            found[FIGURES] = self._sums(self.wanted, self.of, self.dim_of_classes(values, leaves), values)
        if MIXTURE in self.names:
            means, variances = means_and_variances(answer, False)
            weighted = self.weights is not None
            found[MEANS] = self._sums(requested(["mean", "var"], None, weighted), None, 1, means)
            found[VARIANCES] = self._sums(requested(["mean"], None, weighted), None, 1, variances)
        return found

    def _sums(self, wanted: Sequence[Requested], of: str | None, dim: int, values: Tensor) -> StreamedSums:
        sums = StreamedSums(of, dim - 1, self.weights is None, reads_of(wanted))
        shares = self.shares(values, values.shape[0])
        if not shares:
            add_answers(sums, values[:1], [1.0])
            sums.put({name: t.zero_() for name, t in sums.tensors.items()}, 0, 0.0)
        elif len(shares) == values.shape[0]:
            add_answers(sums, values, list(shares.values()))
        else:
            add_answers(sums, values[list(shares)], list(shares.values()))
        return sums


def reads_of(wanted: Sequence[Requested]) -> frozenset[str]:
    """Returns what figures read: names of properties of sums."""
    return frozenset(r for w in wanted for r in w.figure.reads)


def figures_of(reduction: Reduction, sums: Mapping[str, StreamedSums]) -> dict[str, Any]:
    """Returns the requested figures of the sums of all members, in the order of the caller."""
    found: dict[str, Any] = {w.text: w.figure.compute(sums[FIGURES], w.number) for w in reduction.wanted}
    if MIXTURE in reduction.names:
        means, variances = sums[MEANS], sums[VARIANCES]
        found[MIXTURE] = means.mean, means.var + variances.mean
    return reduction.ordered(found)
