"""Binds members of an entry for routing: each has functions of its own rows over views of its weights.

`RowWeights` keeps the weights of all members stacked, for calls that read those of each row's own member.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from widepack_artifacts.program import Program

from ...ir.edit import with_reshapes
from ...rows.call import MixesRows
from ...rows.layout import Layout, RowAxis
from ...rows.verdict import UNREADABLE
from ...rows.walk import walk
from ...runtime.executable import storage
from ...runtime.graph_module import Function, graph_module
from ...runtime.value_memory import ValueMemory
from ...system import deadline
from ...system.autocast import plain_modes
from ..entry_programs import EntryPrograms
from .per_row import PerRowProgram, per_row_program, replace_part, stack
from .row_independence import examined
from .trunk import SplitProgram, split_trunk

MOST_BYTES = 128 * 2**20
"""The most memory that the stacked weights of an entry may take."""


class RowWeights:
    """The stacked weights of all members.

    Attributes:
        form: The function that takes them.
        values: For each weight of its program the stacked values, or the value that members share.
    """

    def __init__(self, form: PerRowProgram, members: Sequence[Sequence[Any]], changes: Counter[int]) -> None:
        self.form = form
        self.values: list[Any] = [
            stack([own[k] for own in members], how) if how else members[0][k]
            for k, how in enumerate(form.forms)
        ]
        self._changes = Counter(changes)

    @classmethod
    def of(
        cls, form: PerRowProgram, members: Sequence[Sequence[Any]], changes: Counter[int]
    ) -> RowWeights | None:
        """Stacks the weights of all members; None if their values have other shapes or take too much memory.

        members: the values of each member, in the order of the program. changes: how often each was replaced.
        """
        sizes = 0
        for number, shape in form.shapes.items():
            for own in members:
                value = own[number]
                if (
                    not isinstance(value, Tensor)
                    or tuple(value.shape) != shape
                    or value.dtype != torch.float32
                ):
                    return None
                sizes += 4 * value.numel()
        return cls(form, members, changes) if sizes <= MOST_BYTES else None

    def is_current(self, changes: Counter[int]) -> bool:
        """Returns whether no member was replaced since. changes: how often each was replaced."""
        return self._changes == changes

    def update(self, members: Sequence[Sequence[Any]], changes: Counter[int]) -> None:
        """Copies the weights of the members that were replaced since. No call reads them meanwhile."""
        for place in [p for p, count in changes.items() if count != self._changes[p]]:
            for k, how in enumerate(self.form.forms):
                if how:
                    replace_part(self.values[k], place, members[place][k], how)
        self._changes = Counter(changes)


@dataclass(frozen=True)
class RoutedProgram:
    """The functions of a member program.

    whole: on the inputs. views: the numbers of its outputs that may share memory with a weight or an input.
    trunk, rest: as in `SplitProgram`. per_row: the rest for rows of several members; None if it has no such
    form.
    """

    program: Program
    whole: Function
    views: tuple[int, ...]
    split: SplitProgram
    trunk: Function | None
    rest: Function
    per_row: PerRowProgram | None


@dataclass(frozen=True)
class RoutedMember:
    """A member's functions, and the weights that each takes. storages: the memory of all of them."""

    functions: RoutedProgram
    whole: list[Any]
    shared: list[Any]
    rest: list[Any]
    storages: frozenset[int]


class RoutedMembers:
    """The members of one entry, each bound when it is first needed.

    letter: the dim of the rows. axes: where the rows are in each input.
    """

    def __init__(self, programs: EntryPrograms, letter: str, axes: Sequence[RowAxis | None]) -> None:
        self._programs, self._artifact, self._entry = programs, programs.artifact, programs.entry
        self._letter, self._axes = letter, axes
        weights = self._artifact.manifest.member_weights
        self._own = {w.name for w in weights if w.kind != "shared"}
        self._of_signature: dict[int, RoutedProgram] = {}
        self._bound: dict[int, RoutedMember] = {}
        self._stacked: RowWeights | None = None
        self._failed = False

    def bound(self, places: Sequence[int]) -> dict[int, RoutedMember]:
        """Returns members by their numbers. Not inside the gate: a swap that holds the lock waits for it.

        Raises: UsageError if the model was closed.
        """
        return {place: self._bound.get(place) or self._bind(place) for place in dict.fromkeys(places)}

    def _bind(self, place: int) -> RoutedMember:
        """Returns a member's functions, and its weights for each of them: views, also after a swap."""
        with self._artifact.lock, plain_modes():
            self._artifact.check_open()
            program, values = self._programs.source.member(place)
            program = with_reshapes(program)  # parts of inputs may have another memory order
            signature = self._entry.signatures[self._artifact.chosen[place]]
            if signature not in self._of_signature:
                self._of_signature[signature] = self._made(program)
            functions = self._of_signature[signature]
            of = {s.source: v for s, v in zip(program.weights, values, strict=True)}
            trunk, rest = functions.split.trunk, functions.split.rest
            found = self._bound[place] = RoutedMember(
                functions,
                list(values),
                [of[s.source] for s in trunk.weights] if trunk is not None else [],
                [of[s.source] for s in rest.weights],
                frozenset({storage(v) for v in values} - {0}),
            )
        return found

    def for_rows(
        self, rows: int, members: Mapping[int, RoutedMember], apart_ms: float | None = None
    ) -> RowWeights | None:
        """Returns the stacked weights if a call of these rows is faster with them. Not inside the gate.

        rows: the number of rows of the call. members: those that have rows. apart_ms: what these take one
        after the other; None if it was not measured.
        """
        functions = next(iter(members.values())).functions
        form = functions.per_row
        if form is None or self._failed or not form.is_faster(rows, len(members), apart_ms):
            return None
        if self._stacked is None or not self._stacked.is_current(self._artifact.changes):
            every = self.bound(range(len(self._artifact.members)))
            values = [every[place].rest for place in range(len(every))]
            with self._artifact.lock, plain_modes(), torch.inference_mode():
                self._artifact.check_open()
                if self._stacked is None:
                    same = all(m.functions is functions for m in every.values())
                    self._stacked = RowWeights.of(form, values, self._artifact.changes) if same else None
                    self._failed = self._stacked is None
                else:
                    self._stacked.update(values, self._artifact.changes)
        return self._stacked

    def _made(self, program: Program) -> RoutedProgram:
        """Returns the functions of a member program."""
        layouts = self._layouts(program)
        split = SplitProgram(None, program, range(len(program.inputs)), self._axes)
        if layouts and not all(s.source in self._own for s in program.weights):
            split = split_trunk(program, self._own, layouts)
        whole, memory = self._function(program), ValueMemory(program)
        views = tuple(k for k, o in enumerate(program.outputs) if memory.may_be_outside(o.value.name))
        trunk = self._function(split.trunk) if split.trunk is not None else None
        rest = self._function(split.rest) if trunk is not None else whole
        form = self._per_row(split.rest, layouts[0]) if layouts else None
        return RoutedProgram(program, whole, views, split, trunk, rest, form)

    def _per_row(self, program: Program, layouts: Mapping[str, Layout]) -> PerRowProgram | None:
        """Returns the function of a program for rows of several members."""
        own = {s.name for s in program.weights if s.source in self._own}
        if self._artifact.device.type != "cpu" or not own:
            return None
        return per_row_program(program, own, layouts, self._artifact.device)

    def _function(self, program: Program) -> Function:
        return graph_module(program, self._artifact.device, direct=True).forward

    def _layouts(self, program: Program) -> Sequence[Mapping[str, Layout]]:
        """Returns where the rows of each value are; nothing if that is not known."""
        sizes = examined(self._programs).walk_sizes(self._letter)
        if not sizes:
            return []
        try:
            with deadline.within(60 + 0.5 * len(program.nodes)):
                return walk(program, self._letter, sizes)
        except (MixesRows, *UNREADABLE):
            return []
