"""Makes the rows of weights that are stored as factors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from torch import Tensor

from widepack_artifacts.correction import encode_correction, rounded
from widepack_artifacts.factored import FactoredWeight
from widepack_artifacts.weight_table import FACTOR, Weight, member_tensor

from ..checkpoints.alignment import Alignment
from ..fleet.factors import Factors
from ..spec.dtypes import dtype_name
from .weight_row import WeightRow


@dataclass(frozen=True)
class FactoredRow:
    """A weight that is stored as factors.

    member: the weight as the members have it. factors: of all members. exact: whether they give the members'
    weights bit for bit. original: the weight as the checkpoints have it, where the members' is approximate.
    """

    member: WeightRow
    factors: Factors
    exact: bool
    original: WeightRow | None = None

    @classmethod
    def of(cls, row: WeightRow, factors: Factors, exact: bool) -> FactoredRow:
        """Returns the row of a weight. row: as the checkpoints have it. exact: as for the fleet."""
        if not factors.approximate:
            return cls(row, factors, exact)
        return cls(WeightRow(row.weight, partial(rounded, factors)), factors, True, row)

    def checkpoint_value(self, i: int) -> Tensor:
        """Returns the weight as member i's checkpoint has it."""
        return (self.original or self.member).value(i)

    @cached_property
    def weight(self) -> FactoredWeight:
        """The row of the manifest."""
        of = self.member.weight
        base, left, right, scale = (f"{of.name}@{part}" for part in ("base", "left", "right", "scale"))
        ranks, aliases = list(self.factors.ranks), list(of.aliases)
        scale = "" if self.factors.scale is None else scale
        return FactoredWeight(of.name, of.role, base, left, right, ranks, aliases, scale)

    def stored(self) -> list[WeightRow]:
        """Returns the rows of the base, the factors and the scales."""
        w, f, of = self.weight, self.factors, self.member.weight
        base = f.base.reshape(list(of.shape))
        parts = ((w.left, f.left), (w.right, f.right), *([] if f.scale is None else [(w.scale, f.scale)]))
        return [
            WeightRow(Weight(w.base, "shared", of.dtype, list(of.shape), FACTOR), lambda i: base),
            *(
                WeightRow(
                    Weight(name, "stacked", dtype_name(t.dtype), list(t.shape[1:]), FACTOR), t.__getitem__
                )
                for name, t in parts
            ),
        ]

    def corrections(self, count: int) -> Mapping[str, bytes]:
        """Returns the corrections of all members, by the names of their tensors; empty if there are none.

        count: the number of members.
        """
        if self.exact:
            return {}
        return {
            member_tensor(self.weight.name, i): encode_correction(self.member.value(i), self.factors, i)
            for i in range(count)
        }


def with_factored(aligned: Alignment, rows: Sequence[FactoredRow]) -> Alignment:
    """Returns the members with the weights that approximate factors give. rows: of all factored weights."""
    near = [row for row in rows if row.original is not None]
    if not near:
        return aligned
    checkpoints = [
        checkpoint.with_values({row.weight.name: partial(row.member.value, i) for row in near})
        for i, checkpoint in enumerate(aligned.checkpoints)
    ]
    return replace(aligned, checkpoints=tuple(checkpoints))
