"""Runs rows of a fleet in one call, each with the factors of its own member.

The wide program has the rows of the call in the place of the members: each weight that members do not share
is gathered by the numbers of the rows' members. For weights that are stored as factors these are thin, and
the base runs once over all rows. One program serves all calls of up to as many rows, in powers of two; it is
lowered when a call first needs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from widepack_artifacts.program import Kind, Program

from ...ir.torch_internals import inference_guard
from ...rows.layout import RowAxis
from ...runtime.admission import check_member_run
from ...runtime.graph_module import Function, graph_module
from ...system.autocast import autocast_off, plain_modes
from ..entry_programs import EntryPrograms
from ..output import check_rows
from ..programs.merged_weights import SPLIT, has_memory
from .row_groups import count_padding

MOST_ROWS = 64
"""The most rows of one program. A longer call runs in parts."""
MOST_FOR_EACH = 8
"""The most rows for each of the members of a call. With more, one member after the other is faster."""
_THIN = 4
"""A row's own weights may have one of so many parts of a member's bytes."""


@dataclass(frozen=True)
class _RowProgram:
    """A program for a number of rows, and its function."""

    program: Program
    function: Function


@dataclass(frozen=True)
class GatheredCall:
    """A call whose rows run together.

    rows: what runs it. numbers: the number of each row's member. programs: by their number of rows.
    """

    rows: GatheredRows
    numbers: Sequence[int]
    programs: Mapping[int, _RowProgram]

    def run(self, *values: Tensor) -> list[Any]:
        """Runs the call, inside of the gate. Returns: the leaves of the answer, in the order of the rows."""
        with autocast_off(), inference_guard(True):
            return self.rows.run(values, self.numbers, self.programs)


class GatheredRows:
    """Chooses calls whose rows run together.

    programs: of the entry. letter: the dim of the rows. axes: where they are in each input. dims: in which
    dim of each leaf of the answer they are.
    """

    def __init__(
        self, programs: EntryPrograms, letter: str, axes: Sequence[RowAxis | None], dims: Sequence[int]
    ) -> None:
        self._programs, self._letter = programs, letter
        self._axes, self._dims = axes, dims
        self._artifact = programs.artifact
        self._title = f"{self._artifact.reader.root.name}: entry {programs.name}"
        factored = {w.name for w in self._artifact.manifest.factored.weights}
        whole = [w for w in self._artifact.manifest.member_weights if w.name in factored]
        self._member_bytes = sum(w.bytes(1) for w in whole)
        self._lowered: dict[int, _RowProgram | None] = {}
        self._admitted: set[tuple[int, tuple[torch.Size, ...]]] = set()

    @property
    def possible(self) -> bool:
        """Whether any call may run so."""
        artifact, entry = self._artifact, self._programs.entry
        if not artifact.factors or len(set(entry.signatures)) > 1 or len(artifact.chosen) < 2:
            return False
        if not self._programs.inputs.fits({**self._programs.inputs.example, self._letter: 1}):
            return False
        own = sum(w.bytes(1) for w in artifact.manifest.weights if w.kind == "stacked")
        return _THIN * own <= sum(w.bytes(1) for w in artifact.manifest.member_weights)

    def call(self, numbers: Sequence[int], others: Mapping[str, int]) -> GatheredCall | None:
        """Returns a call whose rows run together; None if one member after the other is faster and there is
        memory for the members' whole weights, or if the program has no such form. Not inside the gate.

        numbers: the number of the member of each row. others: the sizes of the other dims.
        """
        members = len(set(numbers))
        many = members < 2 or len(numbers) > MOST_FOR_EACH * members
        if many and has_memory(self._artifact, members * self._member_bytes):
            return None
        if not self._programs.inputs.fits({**others, self._letter: 1}):
            return None
        found = {}
        for first in range(0, len(numbers), MOST_ROWS):
            count = _power_of_two(min(MOST_ROWS, len(numbers) - first))
            program = self._program(count)
            if program is None:
                return None
            found[count] = program
        return GatheredCall(self, numbers, found)

    def run(
        self, values: Sequence[Tensor], numbers: Sequence[int], programs: Mapping[int, _RowProgram]
    ) -> list[Tensor]:
        """Runs the rows of a call, inside of the gate."""
        parts = []
        for first in range(0, len(numbers), MOST_ROWS):
            some = numbers[first : first + MOST_ROWS]
            parts.append(self._part(values, some, first, programs[_power_of_two(len(some))]))
        if len(parts) == 1:
            return parts[0]
        return [torch.cat(leaves, dim) for leaves, dim in zip(zip(*parts), self._dims)]

    def _part(
        self, values: Sequence[Tensor], numbers: Sequence[int], first: int, form: _RowProgram
    ) -> list[Tensor]:
        """Runs up to `MOST_ROWS` rows. The program may be for more rows: the last one runs again."""
        count, device = form.program.members, self._artifact.device
        padded = [*numbers, *[numbers[-1]] * (count - len(numbers))]
        count_padding(count - len(numbers))
        places = _in_order(padded)
        ids = torch.tensor(padded, device=device) if places is None else slice(min(padded), max(padded) + 1)
        rows = [min(k, len(numbers) - 1) for k in range(count)] if places is None else places
        order = torch.tensor([row + first for row in rows], device=device)
        weights = [self._gathered(s.source, s.kind, ids) for s in form.program.weights]
        given = [_rows_first(v, axis, order) for v, axis in zip(values, self._axes)]
        self._admit(form, [*weights, *given])
        found = list(form.function(*weights, *given))
        check_rows(self._title, found, [dim + 1 for dim in self._dims], 1)
        answers = []
        for leaf, dim in zip(found, self._dims):
            if places is not None:  # rows of distinct members: back in the order of the call
                leaf = torch.empty_like(leaf).index_copy_(0, order - first, leaf)
                answers.append(leaf.squeeze(dim + 1).movedim(0, dim))
                continue
            found_rows = leaf[: len(numbers)].squeeze(dim + 1).movedim(0, dim)
            answers.append(found_rows.contiguous() if len(numbers) < count else found_rows.clone())
        return answers

    def _gathered(self, source: str, kind: Kind, ids: Tensor | slice) -> Any:
        """Returns a weight of the rows' members: a view if their numbers follow each other."""
        value = self._artifact.weights.get(source)
        if kind != "stacked":
            return value
        return value[ids] if isinstance(ids, slice) else value.index_select(0, ids)

    def _admit(self, form: _RowProgram, given: Sequence[Any]) -> None:
        """Checks once at each size what a program of an untrusted file takes. Raises: OverBudget."""
        key = form.program.members, tuple(v.shape for v in given)
        if self._artifact.limits.limit is None or key in self._admitted:
            return
        check_member_run(f"{self._title}: the program of rows", form.program, given)
        self._admitted.add(key)

    def _program(self, count: int) -> _RowProgram | None:
        """Returns the program for a number of rows; None if an op cannot run over factors."""
        with self._artifact.lock, plain_modes():
            if count not in self._lowered:
                self._lowered[count] = self._lower(count)
            return self._lowered[count]

    def _lower(self, count: int) -> _RowProgram | None:
        # these import the rules, which only lowering needs
        from ...lowering.pattern_programs import simplified
        from ...planning.request import StrategyRequest

        artifact, inputs, entry = self._artifact, self._programs.inputs, self._programs.entry
        simple = simplified(
            [artifact.program(entry.member[entry.signatures[artifact.chosen[0]]], self._programs.name)],
            [0] * count,
            artifact.kinds,
            [axis is not None for axis in self._axes],
            dict(inputs.example),
            inputs.letter,
            "each",
            factors=artifact.factors,
        )
        plan, *others = simple.plans(artifact.device.type, StrategyRequest.parse(list(SPLIT)))
        if others:  # no layer can split its weights
            return None
        program = simple.lower(plan).program
        whole = {w.name for w in artifact.manifest.factored.weights}
        looped = any(n.body is not None for n in program.nodes)
        if looped or any(s.source in whole for s in program.weights):
            return None
        if any(o.kind != "stacked" for o in program.outputs):
            return None
        return _RowProgram(program, graph_module(program, artifact.device, direct=True).forward)


def _in_order(numbers: Sequence[int]) -> list[int] | None:
    """Returns the places of rows in the order of their members, if these are distinct and follow each other;
    None for other rows. Such rows read views of the weights, and nothing is gathered.
    """
    places = sorted(range(len(numbers)), key=numbers.__getitem__)
    first = numbers[places[0]]
    if all(numbers[place] == first + k for k, place in enumerate(places)):
        return places
    return None


def _power_of_two(rows: int) -> int:
    return max(2, 1 << (rows - 1).bit_length())


def _rows_first(value: Tensor, axis: RowAxis | None, order: Tensor) -> Tensor:
    """Returns an input `[rows, ...]` with one row in the place of the member's batch."""
    if axis is None:
        return value
    rows = value.index_select(axis.dim, order)
    return rows.movedim(axis.dim, 0).unsqueeze(axis.dim + 1)
