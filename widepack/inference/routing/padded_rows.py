"""Runs rows of several members in one call of all members, each with as many rows as the largest group.

Members with fewer rows get rows again, and those answers are left out. This is right for networks whose ops
are faster for all members at once, such as small convolutions, if the groups are about equally large.
`build` and `tune` measure where it is faster. Without their times a rule of thumb chooses it for
packed convolutions of all members, which plans prefer to a loop over the members at small batches only.

`RowPrices` predicts what rows of several members cost, from measured times of the pattern `each`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...ir.torch_internals import inference_guard
from ...planning.plan import LOOP, Plan, for_size, scaled
from ...rows.layout import RowAxis
from ...system.autocast import autocast_off
from ..entry_programs import EntryPrograms
from ..output import check_rows
from ..programs.bound_program import BoundProgram
from ..single_members import MemberTimes, between
from .row_groups import count_padding


class RowPrices:
    """Milliseconds of the pattern `each` by the number of rows of each member.

    Args:
        plans: The plans of the pattern, one for each batch class.
        members: N, which every measured call has run.

    Attributes:
        known: Whether the plans were measured, with the loop beside them.
    """

    def __init__(self, plans: Sequence[Plan], members: int) -> None:
        measured = sorted((p for p in plans if p.at and LOOP in p.times_ms), key=lambda p: p.at)
        self.known = bool(measured)
        self._each = [(p.at, min(p.times_ms.values())) for p in measured]
        self._alone = MemberTimes(plans, members)

    def padded(self, rows: int) -> float:
        """Returns the milliseconds of a call in which every member has a number of rows."""
        return between(self._each, rows)

    def groups(self, counts: Mapping[int, int]) -> float:
        """Returns the milliseconds of a call that runs one member after the other.

        counts: the number of rows of each member that has rows.
        """
        return self._alone.groups(counts.values()) or 0.0


MOST = 16.0
"""The most rows that run for each row of a call, since memory grows with them."""
_MOST_BY_RULE = 2.5
"""The same without measured times."""
_CLEAR = 0.97
"""By how much the prediction must be below that of groups."""
_PATTERN = "each"


@dataclass(frozen=True)
class PaddedCall:
    """A call in which every member has as many rows.

    title: the entry in messages. program: of the pattern `each`. members: N. rows: of each member. order: for
    each place of `[N, rows]` the row of the call that runs there. places: for each row of the call its place.
    axes: where the rows are in each input. dims: in which dim of each leaf of the answer they are.
    """

    title: str
    program: BoundProgram
    members: int
    rows: int
    order: Tensor
    places: Tensor
    axes: Sequence[RowAxis | None]
    dims: Sequence[int]

    def run(self, *values: Tensor) -> list[Any]:
        """Runs the call, inside of the gate. Returns: the leaves of the answer, in the order of the rows."""
        count_padding(len(self.order) - len(self.places))
        with autocast_off(), inference_guard(True):
            given = [self._spread(v, axis) for v, axis in zip(values, self.axes)]
            found = self.program.run(*given)
            check_rows(self.title, found, [dim + 1 for dim in self.dims], self.rows)
            return [self._gathered(leaf, dim) for leaf, dim in zip(found, self.dims)]

    def _spread(self, value: Tensor, axis: RowAxis | None) -> Tensor:
        """Returns an input `[N, ...]`, in which each member has its rows."""
        if axis is None:
            return value.expand(self.members, *value.shape)
        rows = torch.unflatten(value.index_select(axis.dim, self.order), axis.dim, (self.members, self.rows))
        return rows.movedim(axis.dim, 0).contiguous()

    def _gathered(self, leaf: Tensor, dim: int) -> Tensor:
        """Returns the answers of a leaf `[N, ...]` in the order of the rows."""
        if dim:
            leaf = leaf.movedim(0, dim)
        return leaf.flatten(dim, dim + 1).index_select(dim, self.places)


class PaddedRows:
    """Chooses calls that run padded.

    programs: of the entry. letter: the dim of the rows. axes: where they are in each input. dims: in which
    dim of each leaf of the answer they are.
    """

    def __init__(
        self, programs: EntryPrograms, letter: str, axes: Sequence[RowAxis | None], dims: Sequence[int]
    ) -> None:
        self._programs, self._letter = programs, letter
        self._axes, self._dims = axes, dims
        self._members = len(programs.artifact.chosen)
        self._plans = programs.source.stored_plans(_PATTERN)
        self._prices = RowPrices(self._plans, self._members)

    @property
    def possible(self) -> bool:
        """Whether any call may run padded."""
        return self._prices.known or any(map(_packs, self._plans))

    def call(self, numbers: Sequence[int], others: Mapping[str, int]) -> PaddedCall | None:
        """Returns a call if it is predicted to be faster than one member after the other. Not inside the
        gate.

        numbers: the number of the member of each row. others: the sizes of the other dims.
        """
        counts = Counter(numbers)
        rows = max(counts.values())
        padding = rows * self._members / len(numbers)
        sizes = {**others, self._letter: rows}
        if padding > MOST or not self._faster(counts, rows, padding, sizes):
            return None
        if not self._programs.inputs.fits(sizes):
            return None
        program = self._programs.for_sizes(_PATTERN, sizes)
        if program.lists or any(o.kind != "stacked" for o in program.program.outputs):
            return None
        order, places = self._placed(numbers, rows)
        title = f"{self._programs.artifact.reader.root.name}: entry {self._programs.name}"
        return PaddedCall(title, program, self._members, rows, order, places, self._axes, self._dims)

    def _faster(self, counts: Mapping[int, int], rows: int, padding: float, sizes: Mapping[str, int]) -> bool:
        """Returns whether a padded call is faster: by measured times, else by the rule of thumb."""
        if self._prices.known:
            return self._prices.padded(rows) < _CLEAR * self._prices.groups(counts)
        inputs = self._programs.inputs
        plan = for_size(self._plans, scaled(sizes, inputs.letter, inputs.example), lambda p: p)
        return padding <= _MOST_BY_RULE and _packs(plan)

    def _placed(self, numbers: Sequence[int], rows: int) -> tuple[Tensor, Tensor]:
        """Returns the row of each place, and the place of each row."""
        order = [0] * (self._members * rows)
        used = [0] * self._members
        places = []
        for row, member in enumerate(numbers):
            place = member * rows + used[member]
            used[member] += 1
            order[place] = row
            places.append(place)
        device = self._programs.artifact.device
        return torch.tensor(order, device=device), torch.tensor(places, device=device)


def _packs(plan: Plan) -> bool:
    """Returns whether a plan runs packed convolutions for all members at once, and no loop."""
    return plan.strategies().get("packed", 0) > 0 and not plan.looped()
