"""Decides whether the rows of a batch are independent: first the walk, then the trials."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from widepack_artifacts.entry import Rows
from widepack_artifacts.program import Node, Program

from ..errors import LoweringError
from ..ir.tensor_type import parse_slot, tensor_type
from ..spec.input_spec import DimExpr
from .axes import row_axis_of
from .call import MixesRows, NoRule
from .layout import EVEN
from .trials import NoTrial, RowTrials
from .walk import walk

MOST = 64
"""The largest batch that is tried."""
LARGE = 8
"""The batch of which other batches are parts in a trial of a proved program, if the model takes it."""
NUMBERS = 2**18
"""The most numbers in the inputs of a larger trial, of a program that is not proved.

If the example's sizes give more, trials have smaller sizes.
"""
SMALL = 1024
"""The sizes of other dims that are tried for smaller trials are below this."""
UNREADABLE = (
    LoweringError,
    ValueError,
    RuntimeError,
    DataDependentOutputException,
    DynamicOutputShapeException,
)
"""What the walk raises for a program whose sizes cannot be computed without values."""
_SORTS = ("aten.sort.default", "aten.sort.stable", "aten.argsort.default")
_PACKED = "widepack.sequence_lengths.default"
LENGTH = 1000
"""The most characters of a reason."""


@dataclass(frozen=True)
class ExaminedEntry:
    """An entry whose rows are examined: its member programs, and how to run them.

    programs: One for each shape signature. sizes: The size of each dim in the example. fits: Returns whether
    sizes are within the bounds of the dims and satisfy the guards. outputs: The type of each output. trials:
    Makes the trials of a program, by its number, along a dim.
    """

    programs: Sequence[Program]
    sizes: Mapping[str, int]
    fits: Callable[[Mapping[str, int]], bool]
    outputs: Sequence[str]
    trials: Callable[[int, str], RowTrials]

    def batches(self, letter: str, sizes: Mapping[str, int] | None = None) -> list[int]:
        """Returns the sizes of a dim that the model takes at these sizes of the others.

        sizes: default the example's.
        """
        return [b for b in range(1, MOST + 1) if self.fits({**(sizes or self.sizes), letter: b})]

    def rows(self) -> Rows:
        """Decides along which dim the rows are independent: B, or else the first such dim of the inputs.

        If there is none, the answer is about the first dim.
        """
        first: Rows | None = None
        for letter in dims_of(self.programs[0]):
            found = self._along(letter)
            if found.independent:
                return found
            first = first or found
        return first or Rows("", False, True, "no dim of the inputs is dynamic, so there is no batch")

    def proved_along(self, letter: str) -> bool:
        """Returns whether the walk proves for all programs that rows along a dim are independent."""
        if letter not in dims_of(self.programs[0]):
            return False
        for program in self.programs:
            try:
                if self._without_rows(program, letter) or self._walk(program, letter):
                    return False
            except MixesRows:
                return False
        return True

    def _along(self, letter: str) -> Rows:
        """Decides for one dim and all programs."""
        found = Rows(letter, True, True)
        for number in range(len(self.programs)):
            one = self._program_along(number, letter)
            if not one.independent:
                return one
            found = found if one.proved else one
        return found

    def _program_along(self, number: int, letter: str) -> Rows:
        """Decides for one dim and one program."""
        program, batches = self.programs[number], self.batches(letter)
        if why := self._without_rows(program, letter):
            return Rows(letter, False, True, _text(why))
        if len(batches) < 2 or batches[-1] < 3:
            return Rows(letter, False, True, f"the model takes too few sizes of the dim {letter}")
        try:
            reason = self._walk(program, letter)
        except MixesRows as e:
            return Rows(letter, False, True, _text(words(e.node, e.why + _of_packing(program, e.node))))
        sizes = self._trial_sizes(program, letter)
        batches = self.batches(letter, sizes)
        rows = 3 if 3 in batches else next(b for b in batches if b >= 2)
        large = next((b for b in batches if b >= LARGE), batches[-1])
        if reason:
            most = NUMBERS // _numbers_of_a_row(program, letter, sizes)
            large = max([large, *(b for b in batches if b <= most)])
        try:
            trials = self.trials(number, letter)
            why = trials.difference(sizes, rows, large, [b for b in batches[:2] if b < large])
        except NoTrial as e:
            why = f"no trial could run ({e})" if reason else ""
        if why:
            return Rows(letter, False, False, _text(f"{why}; {reason}" if reason else why))
        return Rows(letter, True, not reason, _text(reason))

    def _trial_sizes(self, program: Program, letter: str) -> Mapping[str, int]:
        """Returns the sizes of the dims for trials: those of the example.

        If a larger call would have more than `NUMBERS` numbers, each other dim has its smallest size of at
        least 2 that the model takes with the others.
        """
        if LARGE * _numbers_of_a_row(program, letter, self.sizes) <= NUMBERS:
            return self.sizes
        found = dict(self.sizes)
        for dim in self.sizes:
            if dim != letter:
                smaller = range(2, min(found[dim], SMALL))
                fitting = (s for s in smaller if self.fits({**found, dim: s}))
                found[dim] = next(fitting, found[dim])
        batches = self.batches(letter, found)
        return found if len(batches) > 1 and batches[-1] > 2 else self.sizes

    def _without_rows(self, program: Program, letter: str) -> str:
        """Returns why inputs and outputs have no row for each answer; "" if they have."""
        try:
            without = [t for t in self.outputs if row_axis_of(t, letter) is None]
            for slot in program.inputs:
                row_axis_of(slot.type, letter)
        except ValueError as e:
            return f"an input or an output has no single row for each answer: {e}"
        return f"the output {without[0]} has no dim {letter}, the dim of the batch" if without else ""

    def _walk(self, program: Program, letter: str) -> str:
        """Returns why the walk does not show that rows are independent; "" if it does. Raises: MixesRows."""
        try:
            sizes = self.walk_sizes(letter)
            if not sizes:
                return "the model takes too few sizes to tell its dims apart"
            layouts = walk(program, letter, sizes, self.batches(letter)[0])
        except NoRule as e:
            return words(e.node, e.why)
        except UNREADABLE as e:
            lines = str(e).splitlines() or [type(e).__name__]
            return f"the sizes of its values cannot be computed: {lines[0]}"
        for type_, output in zip(self.outputs, program.outputs):
            axis, name = row_axis_of(type_, letter), output.value.name
            if any(found[name] is not EVEN and found[name] != axis for found in layouts):
                return f"the rows of an output {type_} are not in its dim {letter}"
        return ""

    def walk_sizes(self, letter: str) -> list[dict[str, int]]:
        """Returns the sizes for a walk: a prime batch if possible, which does not hide in products.

        The other dims have their sizes of the example, and then others, all different. Returns nothing if
        the model takes no such sizes, or no batch of 2 rows or more.
        """
        batches = self.batches(letter)
        batch = next((b for b in (5, 7, 3, *batches) if b in batches and b >= 2), None)
        if batch is None:
            return []
        first = {d: max(2, size) for d, size in self.sizes.items()} | {letter: batch}
        second = dict(first)
        for dim in first:
            if dim != letter:
                taken = {*first.values(), *second.values()}
                sizes = (s for s in range(2, first[dim] + MOST) if s not in taken)
                other = next((s for s in sizes if self.fits({**second, dim: s})), None)
                if other is None:
                    return []
                second[dim] = other
        if not self.fits(first):
            return []
        return [first, second] if len(first) > 1 else [first]


def dims_of(program: Program) -> list[str]:
    """Returns the dims that inputs name, in order, but `B` first: the usual name of the batch."""
    types = [tensor_type(slot.type) for slot in program.inputs]
    sizes = [size for t in types if t is not None for size in t.sizes]
    letters = dict.fromkeys(size.letter for size in sizes if isinstance(size, DimExpr))
    return sorted(letters, key=lambda letter: letter != "B")


def _numbers_of_a_row(program: Program, letter: str, sizes: Mapping[str, int]) -> int:
    """Returns how many numbers the inputs have for each row."""
    shapes = [parse_slot(slot.type).shape({**sizes, letter: 1}) for slot in program.inputs]
    return max(1, sum(int(math.prod(shape)) for shape in shapes))


def words(node: Node, why: str) -> str:
    """Returns a node and what it does, for messages: `sum.dim_IntList, net.py:31 in forward: reduces ...`."""
    return f"{node.op.removeprefix('aten.')}{f', {node.source}' if node.source else ''}: {why}"


def _of_packing(program: Program, node: Node) -> str:
    """Returns what sorts the rows, if it is torch's packing of sequences; "" for any other node."""
    if node.op not in _SORTS or all(n.op != _PACKED for n in program.nodes):
        return ""
    return (
        "; pack_padded_sequence with enforce_sorted=False sorts the batch by length, and with"
        " enforce_sorted=True it takes rows that are sorted"
    )


def _text(reason: str) -> str:
    """Returns a reason as a text that a manifest may have."""
    return "".join(c if c.isprintable() else " " for c in reason)[:LENGTH]
