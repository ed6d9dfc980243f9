"""An entry's member programs, and what they come to for each pattern."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from widepack_artifacts.program import Kind, Program

from ..ir.fake_values import Shapes
from .pipeline import fold, straighten_all
from ..spec.state import Carried


class Simplified:
    """programs: one a shape signature, in plain ops. kind: of a weight, by its name in the table. states: what the caller carries. sizes: each dim's in the example."""

    def __init__(self, programs: Sequence[Program], kind: Callable[[str], Kind], states: Sequence[Carried], sizes: Mapping[str, int]) -> None:
        self.programs, self.kind, self.states = list(programs), kind, tuple(states)
        self.shapes = [Shapes(sizes) for _ in programs]
        self._simple: dict[str, list[Program]] = {}
        self._straight: list[Program] = []

    def slots(self, pattern: str) -> dict[str, Kind]:
        """The kind of every weight and input of the member program, by value name. A state is one a member in every pattern."""
        program = self.programs[0]
        carried = {s.input for s in self.states}
        return {
            **{s.name: self.kind(s.source) for s in program.weights},
            **{s.name: "shared" if pattern == "shared" and i not in carried else "stacked" for i, s in enumerate(program.inputs)},
        }

    def simple(self, pattern: str) -> list[Program]:
        """The member programs simplified for a pattern."""
        if pattern not in self._simple:
            self._simple[pattern] = self.folded(self.slots(pattern))
        return self._simple[pattern]

    def folded(self, slots: Mapping[str, Kind]) -> list[Program]:
        """The member programs simplified for these kinds of weights and inputs."""
        if not self._straight:
            self._straight = straighten_all(self.programs, self.shapes)
        return [fold(p, slots) for p in self._straight]
