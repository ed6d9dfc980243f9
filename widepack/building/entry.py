"""Stores the data of one entry that the stages of a build share: captures, inputs, dims and conditions."""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch

from widepack_artifacts.literals import Literal
from widepack_artifacts.program import Program

from ..capture.capture import Captured
from ..errors import CaptureError
from ..ir.tensor_type import parse_slot
from ..simplify.canonical import plain
from ..simplify.factored_weights import stored_factors
from ..simplify.pipeline import MemberPrograms
from ..spec.draws import InputSource
from ..spec.input_spec import batch_letter
from ..spec.state import BUFFER, CarriedState
from ..verification import small_sizes
from .build_weights import BuildWeights
from .captures import Captures


class BuildEntry(MemberPrograms):
    """One entry of a build.

    entry: its name. dropout: whether dropout is on. Programs then draw random numbers, and are verified
    without the draws. first: the capture of the first member, with the dims and conditions of all members.
    batch: the dim that batch classes are made of, or "".
    """

    def __init__(self, entry: str, table: BuildWeights, captures: Captures, dropout: bool = False) -> None:
        self.entry, self.table, self.captures = entry, table, captures
        self.dropout = dropout
        self.factory, self.aligned = table.factory, table.aligned
        self.count = table.count
        super().__init__(
            [self._canonical(c.program) for c in captures.captured],
            table.kind,
            captures.first.states,
            captures.first.sizes,
            captures.signatures,
            stored_factors([f.weight for f in table.factored], {r.weight.name: r.weight for r in table.rows}),
        )
        self.set_first(captures.first)
        self.sources = [
            InputSource(
                leaf.name,
                leaf.type,
                *captures.ranges.get(leaf.name, (None, None)),
                example=None if leaf.name in captures.ranges else leaf.example,
            )
            for leaf in self.first.inputs
        ]
        for state in self.states:
            if state.how == BUFFER and self.kind(state.name) == "ragged":
                raise CaptureError(
                    f"state {state.name}: its shape differs between the members, but a state has one shape in"
                    " all members"
                )
        self.batch = batch_letter(parse_slot(leaf.type).dims for leaf in self.first.inputs)

    def set_first(self, first: Captured) -> None:
        """Sets the capture of the first member, and what the entry shows of it.

        bounds: each dim's least and largest size. sizes: each dim's size in the example. signature: the
        parameters of the method, over the leaves of a call. makes: what makes the objects of the call that
        are of a class with named fields, by name in the signature. result: the form of the result, over the
        leaves of the outputs; returned: the same with the states. output_names: of the leaves of the result,
        then of the states. conditions: the expressions of the guards.
        """
        self.first = first
        self.bounds = {d: (least, most) for d, (least, most, _) in first.dims.items()}
        self.sizes, self.signature, self.makes = first.sizes, first.signature, first.makes
        self.result, self.returned = first.result, first.returned
        self.output_names = [name for name, _ in first.outputs]
        self.conditions = [g.expr for g in first.guards]

    @property
    def literals(self) -> tuple[Literal, ...]:
        """What the members' code reads from their weights. Tensors that no checkpoint has are not among
        them.
        """
        rows = self.table.by_name
        stored = {n: r.weight.name for n, r in rows.items() if r.weight.role != "constant"}
        return tuple(x.renamed(stored) for x in self.first.literals if stored.keys() >= {*x.weights})

    @property
    def buffer_inputs(self) -> frozenset[int]:
        """The numbers of the inputs that are buffers of the member."""
        return frozenset(s.input for s in self.states if s.how == BUFFER)

    def without_guards(self, numbers: Collection[int]) -> BuildEntry:
        """Returns the entry without some of its guards."""
        kept = tuple(g for i, g in enumerate(self.first.guards) if i not in numbers)
        return self._with(guards=kept)

    def at_least_two(self, letter: str, why: str) -> BuildEntry:
        """Returns the entry with a dim's lower bound raised to 2. why: how the program fails at size 1."""
        dims = self.first.dims
        return self._with(dims={**dims, letter: small_sizes.at_least_two(letter, dims[letter], why)})

    def _with(self, **changes: Any) -> BuildEntry:
        """Returns a copy with changed fields of `first`. The copy shares the simplified programs."""
        other = copy.copy(self)
        other.set_first(replace(self.first, **changes))
        return other

    def _canonical(self, program: Program) -> Program:
        """Returns the program in plain ops, with the table's names of weights: there, tied weights have one
        name.
        """
        program = plain(program)
        rows = self.table.by_name
        return replace(
            program, weights=tuple(replace(s, source=rows[s.source].weight.name) for s in program.weights)
        )

    def initial(self, state: CarriedState) -> str:
        """Returns the weight that a state begins with; "" for an input, which begins with zeros."""
        return self.table.by_name[state.name].weight.name if state.how == BUFFER else ""

    def initial_value(self, member: int, state: CarriedState) -> torch.Tensor | None:
        """Returns the value that a buffer begins with in one member; None for a state that is an input."""
        return self.table.by_name[state.name].value(member) if state.how == BUFFER else None
