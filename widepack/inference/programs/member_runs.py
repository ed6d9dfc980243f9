"""Runs single members on the probe's inputs: their own programs, in their dtype and in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from widepack_artifacts.program import Program

from ...errors import ArtifactError
from ...ir.random_ops import uses_random_ops, without_randomness
from ...runtime.admission import admit
from ...runtime.graph_module import Function, graph_module
from ...verification.probe import recorded_terms
from ...verification.record import OutputBounds, has_float64_reference, read_bounds
from ...verification.tolerance import ErrorStats, reference_of
from .entry_inputs import EntryInputs
from .failed_call import first_failing, place_of

Weight = Callable[[str], Tensor]
"""Returns a weight of one member by name."""


@dataclass(frozen=True)
class OwnAnswers:
    """One member's answers to one call.

    Attributes:
        own: For each output the answer in the member's dtype.
        truth: For each output the float64 answer.
        bounds: For each output how far the two are apart.
    """

    own: list[Tensor]
    truth: list[Tensor]
    bounds: list[OutputBounds]


class MemberRuns:
    """Runs the members of one entry."""

    def __init__(self, inputs: EntryInputs) -> None:
        self.inputs = inputs
        self.artifact, self.entry, self.name = inputs.artifact, inputs.entry, inputs.name
        self._functions: dict[tuple[int, bool], tuple[Program, Function]] = {}
        self._admitted: set[tuple[int, bool, str]] = set()

    @property
    def float64(self) -> bool:
        """Whether the members' float64 answers are the reference, as the build found out."""
        return has_float64_reference(self.artifact.manifest.verification, self.name)

    def answers(self, pattern: str, place: int, weight: Weight, exact: Weight) -> OwnAnswers:
        """Runs one member on the probe's inputs.

        place: of the member among the loaded ones. weight: its weights as programs take them.
        exact: its weights as the checkpoint has them.
        Raises: RuntimeError and others from torch if the member's program fails.
        """
        inputs = self.inputs.of_probe(pattern), self.inputs.of_probe(pattern, True)
        own, truth = self._answers(pattern, place, weight, exact, *inputs)
        stats = self.new_stats(pattern)
        for output, a, b in zip(stats, own, truth):
            output.add_own(a, b)
            if not self.float64:
                output.widen()
        return OwnAnswers(own, truth, [output.bounds() for output in stats])

    def answers_to(
        self, pattern: str, place: int, inputs: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Runs one member. inputs: of a wide call.

        Returns: for each output the answer in the member's dtype, and the float64 answer. Raises: as
        `answers`.
        """

        def weight(name: str) -> Tensor:
            return self.artifact.weights.of_member(name, place)

        return self._answers(pattern, place, weight, weight, inputs, inputs)

    def _answers(
        self,
        pattern: str,
        place: int,
        weight: Weight,
        exact: Weight,
        given: Sequence[Tensor],
        given_exact: Sequence[Tensor],
    ) -> tuple[list[Tensor], list[Tensor]]:
        with torch.inference_mode():
            own = self._own(pattern, place, weight, given)
            return own, self._float64(pattern, place, exact, given_exact) or [reference_of(o) for o in own]

    def new_stats(self, pattern: str) -> list[ErrorStats]:
        """Returns for each output statistics without errors.

        Those of an output that is zero but for rounding in the artifact have the scale of its terms.
        """
        stats = [ErrorStats(o.name) for o in self.entry.outputs]
        bounds = read_bounds(self.artifact.manifest.verification, self.name, pattern)
        if bounds is not None and self.artifact.probe is not None:
            prefix = self.inputs.probe_prefix(pattern)
            for output, terms in zip(stats, recorded_terms(self.artifact.probe, prefix, bounds)):
                output.terms = terms
        return stats

    def own(self, pattern: str, place: int, weight: Weight) -> list[Tensor]:
        """Returns one member's answers to the probe's inputs in its own dtype."""
        return self._own(pattern, place, weight, self.inputs.of_probe(pattern))

    def _own(self, pattern: str, place: int, weight: Weight, given: Sequence[Tensor]) -> list[Tensor]:
        program, run = self._function(self.artifact.chosen[place], False)
        weights = [weight(s.source) for s in program.weights]
        inputs = self._inputs(pattern, place, weight, given)
        self._admit(pattern, place, False, program, weights, inputs)
        return list(run(*weights, *inputs))

    def _float64(
        self, pattern: str, place: int, exact: Weight, given: Sequence[Tensor]
    ) -> list[Tensor] | None:
        """Returns a member's float64 answers; None if an op has no float64 kernel, or decides otherwise."""
        if not self.float64:
            return None
        from ...ir.cast import raise_value  # imports the registry of ops

        program, run = self._function(self.artifact.chosen[place], True)
        weights = [raise_value(exact(s.source)) for s in program.weights]
        inputs = [raise_value(x) for x in self._inputs(pattern, place, exact, given)]
        self._admit(pattern, place, True, program, weights, inputs)
        try:
            found = run(*weights, *inputs)
        except RuntimeError:
            return None
        return [reference_of(t) for t in found]

    def _inputs(self, pattern: str, place: int, weight: Weight, given: Sequence[Tensor]) -> list[Tensor]:
        """Returns one member's inputs. given: those of a wide call.

        A state that begins as a weight has the member's value.
        """
        initial = {s.input: s.initial for s in self.entry.state if s.initial}
        return [
            weight(initial[k]) if k in initial else x[place] if own else x
            for k, (own, x) in enumerate(zip(self.inputs.per_member(pattern), given))
        ]

    def _admit(
        self,
        pattern: str,
        place: int,
        exact: bool,
        program: Program,
        weights: Sequence[Any],
        inputs: Sequence[Any],
    ) -> None:
        """Checks a member's program against the budget of the load before its first run on these inputs.

        Raises: ArtifactError.
        """
        artifact = self.artifact
        budget, signatures = artifact.limits.budget, self.entry.signatures
        signature = signatures[artifact.chosen[place]]
        if budget is None or (signature, exact, pattern) in self._admitted:
            return
        title = f"{artifact.reader.root}: the member program {signature} of entry {self.name}"
        given = {s.source: w for s, w in zip(program.weights, weights, strict=True)}
        before = budget.spent
        admit(budget, title, program, given, lambda values: inputs, artifact.device, False)
        others = sum(signatures[number] == signature for number in artifact.chosen) - 1
        budget.spent += others * (budget.spent - before)  # each member runs
        budget.admit(title, budget.spent, budget.resident)
        self._admitted.add((signature, exact, pattern))

    def _function(self, number: int, exact: bool) -> tuple[Program, Function]:
        """Returns a member's program, and the function of its weights and inputs, which is made once.

        exact: in float64.
        """
        signature = self.entry.signatures[number]
        if (signature, exact) not in self._functions:
            file = self.entry.member[signature]
            if exact:
                from ...ir.cast import raised  # imports the registry of ops

                program = raised(self.artifact.reader.program(file))
            else:
                program = self.artifact.program(file, self.name)
            program = self.at_rest(program)
            self._functions[signature, exact] = program, graph_module(program, self.artifact.device).forward
        return self._functions[signature, exact]

    def at_rest(self, program: Program) -> Program:
        """Returns a program without its random draws, as the probe was made. Raises: ArtifactError."""
        found = without_randomness(program) if uses_random_ops(program) else program
        if found is None:
            raise ArtifactError(
                f"{self.artifact.reader.root}: a program of entry {self.name} draws random numbers by an op "
                "that cannot be taken out, so no probe can check it"
            )
        return found

    def first_failure(self, pattern: str, place: int, weight: Weight) -> str:
        """Returns the first node of a member's program that fails, as the end of a message; else ""."""
        program, _ = self._function(self.artifact.chosen[place], False)
        weights = [weight(s.source) for s in program.weights]
        inputs = self._inputs(pattern, place, weight, self.inputs.of_probe(pattern))
        found = first_failing(program, weights, inputs, self.artifact.device)
        return "" if found is None else f": {place_of(found[0])}"
