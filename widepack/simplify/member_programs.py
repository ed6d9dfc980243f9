"""Simplifies the member programs of an entry, once for each pattern, and keeps the results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from widepack_artifacts import weights as weight_files
from widepack_artifacts.program import Kind, Program

from ..ir.fake_values import Shapes
from ..ir.kinds import slot_kinds
from ..spec.state import CarriedState
from .factored_weights import FactorNames, with_factors
from .pipeline import fold_all, simplify_all, straighten_all


class MemberPrograms:
    """The member programs of one entry: the base of the entries of builds, artifacts and fused modules.

    programs: one for each shape signature, in plain ops.
    kind: returns the kind of a weight, by its name in the table of weights.
    states: the values that the caller carries from call to call.
    sizes: the size of each dim in the example.
    signatures: for each member the index of its program.
    factors: the weights that are stored as factors, by name. Wide programs read the factors.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        kind: Callable[[str], Kind],
        states: Sequence[CarriedState],
        sizes: Mapping[str, int],
        signatures: Sequence[int],
        factors: Mapping[str, FactorNames] | None = None,
    ) -> None:
        self.programs, self.kind, self.states = list(programs), kind, tuple(states)
        self.signatures = tuple(signatures)
        self.shapes = [Shapes(sizes) for _ in programs]
        self._stored = [with_factors(p, factors) for p in self.programs] if factors else self.programs
        self._simple: dict[str, list[Program]] = {}
        self._straight: list[Program] = []

    def weight(self, name: str, member: int, files: weight_files.Weights) -> torch.Tensor:
        """Returns one member's value of a weight, mapped from the weights files."""
        return files.of_member(name, self.kind(name), member)

    def weights_of(self, member: int, files: weight_files.Weights) -> dict[str, torch.Tensor]:
        """Returns the weights of a member's program by source name, mapped from the weights files."""
        program = self.programs[self.signatures[member]]
        return {s.source: self.weight(s.source, member, files) for s in program.weights}

    def slots(self, pattern: str) -> dict[str, Kind]:
        """Returns the kind of every stored weight and every input of the member program, by value name.

        A state has one value for each member in every pattern.
        """
        program = self._stored[0]
        every = range(len(program.inputs))
        stacked = {s.input for s in self.states} if pattern == "shared" else every
        return slot_kinds(program, self.kind, stacked)

    def simple(self, pattern: str) -> list[Program]:
        """Returns the member programs, simplified for a pattern."""
        if pattern not in self._simple:
            self._simple[pattern] = self.folded(self.slots(pattern))
        return self._simple[pattern]

    def folded(self, slots: Mapping[str, Kind]) -> list[Program]:
        """Returns the member programs, simplified for these kinds of weights and inputs."""
        if not self._straight:
            self._straight = straighten_all(self._stored, self.shapes)
        return fold_all(self._straight, slots)


@dataclass(frozen=True)
class SimplifiedPrograms:
    """Simplified member programs, as lowering needs them.

    signatures: for each loaded member the index of its program.
    slots: the kinds of weights and inputs, by value name.
    """

    programs: list[Program]
    signatures: list[int]
    slots: dict[str, Kind]


def simplified(
    programs: Sequence[Program],
    signatures: Sequence[int],
    weights: Mapping[str, Kind],
    stacked_inputs: Sequence[bool],
    sizes: Mapping[str, int],
    simplify: bool = True,
    factors: Mapping[str, FactorNames] | None = None,
) -> SimplifiedPrograms:
    """Returns the programs of the loaded members, simplified, or as they were captured.

    weights: the kinds of stored weights, by name. stacked_inputs: whether each input has one value for each
    member. factors: the weights that are stored as factors, by name.
    """
    used = sorted(set(signatures))
    programs = [with_factors(p, factors) for p in programs] if factors else programs
    first = programs[used[0]]
    slots = slot_kinds(first, weights.__getitem__, [i for i, own in enumerate(stacked_inputs) if own])
    captured = [programs[s] for s in used]
    return SimplifiedPrograms(
        simplify_all(captured, slots, sizes) if simplify else captured,
        [used.index(s) for s in signatures],
        slots,
    )
