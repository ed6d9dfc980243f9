"""Checks the programs of one entry against the artifact's probe.

A swapped member has other answers than the artifact recorded. Its own answers replace them.

`CastBounds` computes bounds for a model that is loaded in another dtype: `load(dtype=...)`.

The bounds come from the members' own programs in that dtype, against the float64 answers of the probe.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from widepack_artifacts import strict_json
from widepack_artifacts.entry import OutputLeaf

from ...errors import LoweringError, ProbeError, VerificationError, WidepackError
from ...ir.random_ops import uses_random_ops
from ...ir.tensor_type import dtype_in
from ...runtime.admission import guarded
from ...runtime.executable import Executable
from ...runtime.graph_module import Function
from ...spec.dtypes import dtype_name
from ...system import user_cache
from ...verification import probe as probes
from ...verification import weight_error
from ...verification.record import OutputBounds, free_places, read_bounds
from ...verification.tf32_bounds import in_tf32, runs_in_tf32, tf32_kinds
from ...verification.tolerance import floating, same_places
from ...verification.weight_error import WeightError
from .bound_program import BoundProgram
from .entry_inputs import EntryInputs
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
                what = f"output {stats[k].name or k} of member {artifact.members[place]}"
                flat, truth = probes.thinned(artifact.probe, name, answer, what)
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

    def explain(self, error: RuntimeError) -> LoweringError:
        """Returns the error of a program that fails in the requested dtype: a member's or the wide one."""
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
        """Returns a member's answers. Raises: LoweringError for an op without a kernel in the dtype."""

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


class ProbeCheck:
    """The probe of one entry.

    Attributes:
        inputs: The inputs of the entry's calls.
        runs: Runs single members on the probe's inputs.
    """

    def __init__(self, inputs: EntryInputs) -> None:
        self.inputs = inputs
        self.artifact, self.name = inputs.artifact, inputs.name
        self.runs = MemberRuns(inputs)
        self._cast = CastBounds(self.runs)

    def bounds(self, pattern: str) -> list[OutputBounds] | None:
        """Returns the bounds of each output: the artifact's, widened for swapped members and for ops that run
        in TF32. None: none were recorded.
        """
        found = read_bounds(self.artifact.manifest.verification, self.name, pattern)
        if found is None:
            return None
        if self.artifact.probe is not None:
            probes.check_bounds(self.artifact.probe, self.inputs.probe_prefix(pattern), found)
        if self.artifact.cast is None:
            rows = self._in_tf32(found) if self._tf32() else list(found)
        else:
            rows = list(self._cast.of(pattern)[0])  # of answers that were computed on this device
        prefix = self.inputs.probe_prefix(pattern)
        for number in self.artifact.chosen:
            if (swapped := self.artifact.swapped.get(number)) is not None:
                rows = [a.wider(b) for a, b in zip(rows, swapped.bounds.get(prefix, rows))]
        return rows

    def widest_bounds(self, pattern: str) -> list[OutputBounds]:
        """Returns the bounds of a pattern, those of `shared` for a mixed one; [] if none were recorded."""
        return self.bounds(pattern) or self.bounds("shared") or []

    def differ(self, pattern: str, found: Sequence[Any], reference: Sequence[Any]) -> str:
        """Returns where the outputs of two programs differ by more than the probe's bounds; else ""."""
        return difference(self.inputs.entry.outputs, found, reference, self.widest_bounds(pattern))

    def _in_tf32(self, rows: Sequence[OutputBounds]) -> list[OutputBounds]:
        """Returns the bounds of a program that runs in TF32. Only outputs in float32 are less exact then."""
        single = [dtype_in(o.type) in ("float32", "complex64") for o in self.inputs.entry.outputs]
        return [in_tf32(row) if coarse else row for row, coarse in zip(rows, single)]

    def _tf32(self) -> frozenset[str]:
        """Returns the kinds of ops that run in TF32, if the entry's member program has such ops; else none.

        torch's settings are read at each call, because a process may change them.
        """
        kinds = tf32_kinds(self.artifact.device)
        if not kinds:
            return kinds
        program = self.artifact.program(self.inputs.entry.member[0], self.name)
        return kinds if runs_in_tf32(program, kinds) else frozenset()

    def answers(self, pattern: str) -> dict[str, Tensor]:
        """Returns the probe's answers of the loaded members, by name."""
        probe, prefix = self.artifact.probe, f"{self.inputs.probe_prefix(pattern)}.y"
        found = {n: probe.get(n) for n in probe.names if n.startswith(prefix)} if probe is not None else {}
        if found and self.artifact.cast is not None:
            found.update(self._cast.of(pattern)[1])
        for number in self.artifact.chosen:
            if (swapped := self.artifact.swapped.get(number)) is not None:
                found.update({n: t for n, t in swapped.answers.items() if n.startswith(prefix)})
        return found

    def forget_cast(self) -> None:
        """Forgets what members answered in the requested dtype: a member was swapped."""
        self._cast.forget()

    def explain(self, error: Exception) -> WidepackError | None:
        """Returns a better error than torch's if another dtype was requested; else None."""
        if self.artifact.cast is None or not isinstance(error, RuntimeError):
            return None
        return self._cast.explain(error)

    def check(self, pattern: str, run: Function, kinds: Sequence[str]) -> str:
        """Checks a wide program's answers to the probe's inputs. kinds: of its outputs.

        Returns: as `probe.check`. Raises: ProbeError; ArtifactError; what the program raises.
        """
        bounds = self.bounds(pattern)
        if bounds is None or len(bounds) != len(kinds):
            raise ProbeError(
                f"{self.artifact.reader.root} has a probe of entry {self.name}, "
                "but no record of its verification; build it again"
            )
        return probes.check(
            self.answers(pattern),
            self.inputs.probe_prefix(pattern),
            run(*self.inputs.of_probe(pattern)),
            kinds,
            bounds,
            self.artifact.chosen,
            self._free_places(),
        )

    def weight_errors(self, pattern: str, bound: BoundProgram) -> list[WeightError]:
        """Measures what the int8 weights of a bound program change in the probe's answers.

        Raises: VerificationError if it is more than the load allows; ProbeError; what the program raises.
        """
        artifact = self.artifact
        rows = weight_error.measure(
            self.name,
            pattern,
            self.answers(pattern),
            self.inputs.probe_prefix(pattern),
            self._at_rest(bound)(*self.inputs.of_probe(pattern)),
            [o.kind for o in bound.program.outputs],
            [o.name or str(k) for k, o in enumerate(artifact.manifest.entries[self.name].outputs)],
            dict(zip(artifact.chosen, artifact.members)),
            self._free_places(),
        )
        weight_error.check(rows, artifact.options.max_error)
        return rows

    def _free_places(self) -> frozenset[tuple[int, int]]:
        """Returns (member, output) whose NaN and inf may be at other places than in the recorded answers."""
        manifest = self.artifact.manifest
        free = free_places(manifest.verification, self.name)
        outputs = manifest.entries[self.name].outputs
        return frozenset(
            (i, k)
            for i in self.artifact.chosen
            if i not in self.artifact.swapped
            for k, output in enumerate(outputs)
            if (manifest.members[i].name, output.name or str(k)) in free
        )

    def run(self, pattern: str, programs: Sequence[BoundProgram], again: bool = False) -> str:
        """Runs the probe through the programs that have not passed it on this machine. again: through all.

        Returns: how the first answer exceeds the bounds of the build, which are narrower; "" if none does.
        Raises: ProbeError; ArtifactError.
        """
        artifact, beyond = self.artifact, ""
        if artifact.probe is None:
            return beyond
        for bound in programs:
            if bound.int8:
                with guarded(f"{self.inputs.title(pattern)}: the probe", self.explain):
                    self.weight_errors(pattern, bound)
                artifact.check_unchanged()
                continue
            key = self._cache_key(pattern, bound)
            if not again and not artifact.swapped and user_cache.passed(key):
                continue
            with guarded(f"{self.inputs.title(pattern)}: the probe", self.explain):
                kinds = [o.kind for o in bound.program.outputs]
                found = self.check(pattern, self._at_rest(bound), kinds)
            beyond = beyond or found
            artifact.check_unchanged()
            if not artifact.swapped:
                user_cache.remember(key)
        return beyond

    def _cache_key(self, pattern: str, bound: BoundProgram) -> str:
        """Returns the key of a pass in the user's cache: the program, its members, the files of weights
        and probe, and what it ran on.
        """
        artifact = self.artifact
        program = bound.content
        if not program:
            prefix = self.inputs.probe_prefix(pattern)
            program = f"{prefix} {strict_json.digest(bound.program.to_json())}"
        ran_on = [] if bound.backend == "eager" else [bound.backend, bound.place.name if bound.place else ""]
        return user_cache.cache_key(
            artifact.manifest.digest,
            f"{program} {artifact.chosen}",
            artifact.files_key,
            str(artifact.device),
            str(artifact.options.prologue),
            *ran_on,
            *(f"tf32 {kind}" for kind in sorted(self._tf32())),
            *([str(artifact.cast.dtype)] if artifact.cast else []),
        )

    def _at_rest(self, bound: BoundProgram) -> Function:
        """Returns what runs a bound program; if it draws random numbers, what runs it without its draws."""
        if not uses_random_ops(bound.program):
            return bound.run
        weights = {s.source: self.artifact.weights.get(s.source) for s in bound.program.weights}
        program = self.runs.at_rest(bound.program)
        options = self.artifact.options
        return Executable(program, weights, options.device, prologue=options.prologue).run


def difference(
    outputs: Sequence[OutputLeaf],
    found: Sequence[Any],
    reference: Sequence[Any],
    bounds: Sequence[OutputBounds],
) -> str:
    """Returns where the outputs of two runs of a program differ by more than the probe's bounds; else ""."""
    for k, (mine, right) in enumerate(zip(found, reference)):
        row = bounds[k] if k < len(bounds) else None
        for a, b in zip(mine, right) if isinstance(right, list) else [(mine, right)]:
            if words := probes.differs(a, b, row):
                return f"output {outputs[k].name or k} {words}"
    return ""
