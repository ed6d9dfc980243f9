"""Binds members of an entry for routing: each has functions of its own rows over views of its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from widepack_artifacts.program import Program

from ..ir.edit import with_reshapes
from ..rows.call import MixesRows
from ..rows.layout import RowAxis
from ..rows.trunk import SplitProgram, split_trunk
from ..rows.verdict import UNREADABLE
from ..rows.walk import walk
from ..runtime.executable import storage
from ..runtime.graph_module import Function, graph_module
from ..runtime.value_memory import ValueMemory
from ..system import deadline
from ..system.autocast import plain_modes
from .entry_rows import examined
from .programs import EntryPrograms


@dataclass(frozen=True)
class RoutedProgram:
    """The functions of a member program.

    whole: on the inputs. views: the numbers of its outputs that may share memory with a weight or an input.
    trunk, rest: as in `SplitProgram`.
    """

    program: Program
    whole: Function
    views: tuple[int, ...]
    split: SplitProgram
    trunk: Function | None
    rest: Function


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
        weights = self._artifact.manifest.weights
        self._own = {w.name for w in weights if w.kind != "shared"}
        self._of_signature: dict[int, RoutedProgram] = {}
        self._bound: dict[int, RoutedMember] = {}

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

    def _made(self, program: Program) -> RoutedProgram:
        """Returns the functions of a member program."""
        split = self._split(program)
        whole, memory = self._function(program), ValueMemory(program)
        views = tuple(k for k, o in enumerate(program.outputs) if memory.may_be_outside(o.value.name))
        if split.trunk is None:
            return RoutedProgram(program, whole, views, split, None, whole)
        trunk, rest = self._function(split.trunk), self._function(split.rest)
        return RoutedProgram(program, whole, views, split, trunk, rest)

    def _function(self, program: Program) -> Function:
        return graph_module(program, self._artifact.device, direct=True).forward

    def _split(self, program: Program) -> SplitProgram:
        """Splits a member program where it is known where the rows of each value are."""
        plain = SplitProgram(None, program, range(len(program.inputs)), self._axes)
        sizes = examined(self._programs).walk_sizes(self._letter)
        if not sizes or all(s.source in self._own for s in program.weights):
            return plain
        try:
            with deadline.within(60 + 0.5 * len(program.nodes)):
                layouts = walk(program, self._letter, sizes)
        except (MixesRows, *UNREADABLE):
            return plain
        return split_trunk(program, self._own, layouts)
