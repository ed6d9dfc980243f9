"""Defines the entries whose programs are verified: of an artifact, and those that were captured here."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from widepack_artifacts.entry import Dim, Entry, Guard
from widepack_artifacts.factored import FactoredWeight
from widepack_artifacts.manifest_weights import Weight
from widepack_artifacts.program import Kind
from widepack_artifacts.reader import Reader
from widepack_artifacts.tree import Tree

from ..capture.capture import Captured
from ..ir.tensor_type import parse_slot
from ..lowering.pattern_programs import LoweringEntry
from ..simplify.factored_weights import stored_factors
from ..spec.input_spec import batch_letter
from ..spec.state import BUFFER, OUTPUT, CarriedState


class VerifiedEntry(LoweringEntry):
    """What the comparisons read of an entry.

    output_names: of the leaves of the result, then of the states. returned: the form of what the member
    returns, with the states. conditions: the expressions of the guards.
    """

    output_names: Sequence[str]
    returned: Tree
    conditions: Sequence[Any]

    @property
    def buffer_inputs(self) -> frozenset[int]:
        """The numbers of the inputs that are buffers of the member."""
        return frozenset(s.input for s in self.states if s.how == BUFFER)

    def initial(self, state: CarriedState) -> str:
        """Returns the weight that a state begins with; "" for an input, which begins with zeros."""
        raise NotImplementedError


class CapturedEntry(VerifiedEntry):
    """An entry that was captured here.

    captured: the capture of the first member, with the dims and conditions of all members.
    """

    captured: Captured

    def set_captured(self, captured: Captured) -> None:
        """Sets the capture of the first member, and what the entry shows of it."""
        self.captured = captured
        self.bounds = {d: (least, most) for d, (least, most, _) in captured.dims.items()}
        self.batch = batch_letter(parse_slot(leaf.type).dims for leaf in captured.inputs)
        self.sizes, self.signature = captured.sizes, captured.signature
        self.result, self.returned = captured.result, captured.returned
        self.output_names = [name for name, _ in captured.outputs]
        self.conditions = [g.expr for g in captured.guards]

    def row(self, **more: Any) -> Entry:
        """Returns the entry's row in a manifest. more: what the capture does not say."""
        c = self.captured
        return Entry(
            signature=list(c.signature),
            result=c.result,
            dims={d: Dim(least, most, source, c.sizes[d]) for d, (least, most, source) in c.dims.items()},
            guards=tuple(Guard(g.expr, g.source) for g in c.guards),
            fixed=list(c.fixed),
            **more,
        )

    def corrected(self, needless: Collection[int], not_at_one: Mapping[str, str]) -> Captured:
        """Returns the capture with conditions that are corrected by what a member did at small sizes.

        needless: the numbers of the guards that the member does not need. not_at_one: the dims whose smallest
        size is 2, because the program is not valid at 1; and how it fails there.
        """
        dims = dict(self.captured.dims)
        for letter, why in not_at_one.items():
            _, most, line = dims[letter]
            upper = f"; {letter} <= {most} is from {line}" if line else ""
            dims[letter] = 2, most, f"at {letter} = 1 the program may be wrong: {why}{upper}"
        guards = tuple(g for i, g in enumerate(self.captured.guards) if i not in needless)
        return replace(self.captured, dims=dims, guards=guards)


class ArtifactEntry(VerifiedEntry):
    """An entry of an artifact, for members that have the shapes of its members.

    reader: the artifact. row: the entry's row in its manifest. table: the weights by name. factors: those
    that are stored as factors. files: the files of the member programs that are used.
    """

    def __init__(
        self,
        name: str,
        reader: Reader,
        like: Sequence[int],
        weights: Sequence[Weight],
        factored: Sequence[FactoredWeight],
    ) -> None:
        """Reads the entry.

        like: for each member the number of a member of the artifact that has its shapes. weights, factored:
        those of the members.
        """
        self.entry, self.reader = name, reader
        self.row = row = reader.manifest.entries[name]
        self.table = {w.name: w for w in weights}
        self.factors = stored_factors(factored, self.table)
        of = [row.signatures[i] for i in like]
        used = sorted(set(of))
        self.files = [row.member[s] for s in used]
        self.sizes = {d: v.example for d, v in row.dims.items()}
        super().__init__(
            [reader.program(f) for f in self.files],
            lambda n: cast(Kind, "stacked" if n in self.factors else self.table[n].kind),
            _states(row),
            self.sizes,
            [used.index(s) for s in of],
            self.factors,
        )
        self.bounds = {d: (v.min, v.max) for d, v in row.dims.items()}
        self.batch = batch_letter(parse_slot(x.type).dims for x in row.inputs)
        self.signature = row.signature
        # The manifest does not store where the member returns its states.
        self.result = self.returned = row.result
        self.output_names = [o.name for o in row.outputs]
        self.conditions = [g.expr for g in row.guards]

    def initial(self, state: CarriedState) -> str:
        """Returns the weight that a state begins with; "" for an input."""
        return next(s.initial for s in self.row.state if s.input == state.input)


def _states(row: Entry) -> list[CarriedState]:
    """Returns the states of an entry. The manifest does not store whether an input is changed in place."""
    return [
        CarriedState(row.inputs[s.input].name, s.input, s.output, BUFFER if s.initial else OUTPUT)
        for s in row.state
    ]
