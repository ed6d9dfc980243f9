"""Computes bounds for a model that is loaded in another dtype: `load(dtype=...)`.

The bounds come from the members' own programs in that dtype, against the float64 answers of the probe.
"""

from __future__ import annotations

import torch
from torch import Tensor

from widepack_artifacts.weights import Weights

from ..errors import LoweringError, ProbeError, VerificationError
from ..spec.dtypes import dtype_name
from ..verification import probe as probes
from ..verification.record import OutputBounds
from ..verification.tolerance import floating, same_places
from .member_runs import MemberRuns

Renewal = tuple[list[OutputBounds], dict[str, Tensor]]
"""For each output its bounds; and the members' answers that are no floats, by their names in the probe."""


class CastBounds:
    """The bounds of one entry in the requested dtype."""

    def __init__(self, runs: MemberRuns) -> None:
        self.runs = runs
        self.artifact = runs.artifact
        self._renewals: dict[str, Renewal] = {}

    @property
    def _dtype(self) -> str:
        return dtype_name(self.artifact.cast.dtype) if self.artifact.cast else ""

    def forget(self) -> None:
        """Forgets what was computed: a member was swapped."""
        self._renewals.clear()

    def of(self, pattern: str) -> Renewal:
        """Returns the bounds of a pattern, and the answers that are not floats.

        Raises: VerificationError if the dtype cannot represent the answers; LoweringError for an op without a
        kernel.
        """
        if pattern not in self._renewals:
            self._renewals[pattern] = self._computed(pattern)
        return self._renewals[pattern]

    def _computed(self, pattern: str) -> Renewal:
        artifact, prefix = self.artifact, self.runs.inputs.probe_prefix(pattern)
        assert artifact.probe is not None
        stats = self.runs.new_stats(pattern)
        answers: dict[str, Tensor] = {}
        for place, number in enumerate(artifact.chosen):
            if number in artifact.swapped:
                continue
            for k, answer in enumerate(self._own(pattern, place)):
                name = f"{prefix}.y{k}.{number}"
                flat, truth = self._thinned(artifact.probe, name, answer, artifact.members[place])
                if not floating(answer):
                    answers[name] = torch.cat([artifact.probe.get(name)[:1], flat.to(truth.dtype)])
                    continue
                if not same_places(flat, truth):
                    raise VerificationError(
                        f"in {self._dtype} member {artifact.members[place]} answers NaN or inf in "
                        f"output {stats[k].name or k} (the probe's inputs, {pattern}), where its "
                        "float64 answer is a number: the range or precision of this dtype is too "
                        "small for it; load without dtype"
                    )
                stats[k].add_own(flat, truth)
        for output in stats:
            if far := output.unsteady(output.eps):
                raise VerificationError(
                    f"in {self._dtype}, {far}: no bound can be computed from such answers; load without dtype"
                )
        return [output.bounds() for output in stats], answers

    @staticmethod
    def _thinned(probe: Weights, name: str, answer: Tensor, member: str) -> tuple[Tensor, Tensor]:
        """Returns a member's answer, thinned as the probe's, and the probe's. Raises: ProbeError if they do
        not fit.
        """
        stride, truth = probes.recorded(probe, name)
        count = -(-answer.numel() // stride)
        if count != truth.numel() or answer.is_complex() != truth.is_complex():
            raise ProbeError(
                f"probe: the answer {name} has {truth.numel()} numbers of {dtype_name(truth.dtype)}, "
                f"member {member} answers {count} of {dtype_name(answer.dtype)} at its stride; "
                "the artifact's probe and its programs do not belong together"
            )
        return answer.cpu().reshape(-1)[::stride], truth

    def explain(self, error: RuntimeError) -> LoweringError:
        """Returns the error to raise if a program fails in the requested dtype: a member's own, or only the
        wide one.
        """
        try:
            for place in range(len(self.artifact.chosen)):
                self._own("shared", place)
        except LoweringError as found:
            return found
        return LoweringError(
            f"the wide program of entry {self.runs.name} does not run in {self._dtype} on "
            f"{self.artifact.device}, "
            f"where the members do: {' '.join(str(error).split())[:300]}; "
            "load without dtype, or with strategies='loop'"
        )

    def _own(self, pattern: str, place: int) -> list[Tensor]:
        """Returns a loaded member's answers. Raises: LoweringError for an op without a kernel in the
        dtype.
        """

        def weight(name: str) -> Tensor:
            return self.artifact.weights.of_member(name, place)

        try:
            with torch.inference_mode():
                return self.runs.own(pattern, place, weight)
        except RuntimeError as error:  # NotImplementedError is one
            where = self.runs.first_failure(pattern, place, weight)
            raise LoweringError(
                f"entry {self.runs.name} does not run in {self._dtype} on {self.artifact.device}{where}: "
                f"{' '.join(str(error).split())[:200]}; load without dtype, or in one that has it"
            ) from error
