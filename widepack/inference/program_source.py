"""Finds the wide programs of an entry: in the user's cache, in the artifact, or by lowering the member
programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from widepack_artifacts.program import Kind, Program
from widepack_artifacts.strict_json import canonical
from widepack_artifacts.wide_program import WideProgram

from ..errors import ArtifactError, LoweringError, UsageError
from ..planning import plan_cache
from ..planning.plan import Plan, of_this_machine
from ..spec.entries import PATTERNS
from .bound_program import StoredProgram
from .entry_inputs import EntryInputs
from .program_admission import ProgramAdmission


class ProgramSource:
    """The wide programs and the member programs of one entry."""

    def __init__(self, inputs: EntryInputs, admission: ProgramAdmission) -> None:
        self.inputs, self.admission = inputs, admission
        self.artifact, self.entry, self.name = inputs.artifact, inputs.entry, inputs.name

    @property
    def plain(self) -> bool:
        """Whether the artifact's plans have no packed convolutions, because answers with them were not
        right.
        """
        return any(w.plan.get("plain") for w in self.entry.wide)

    def member(self, place: int) -> tuple[Program, list[Any]]:
        """Returns a member's own program, and a value for each of its weights. place: among the loaded
        members.
        """
        program = self.member_program(place)
        return program, [self.artifact.weights.of_member(s.source, place) for s in program.weights]

    def member_program(self, place: int) -> Program:
        """Returns a member's own program. place: of the member among the loaded ones."""
        number = self.artifact.chosen[place]
        return self.artifact.program(self.entry.member[self.entry.signatures[number]], self.name)

    def planned(self, pattern: str) -> list[StoredProgram]:
        """Returns the programs for a pattern: those that were measured here, else the artifact's or lowered
        ones.

        The best of each batch class comes first. Nothing is bound.
        """
        return self.measured(pattern) or self.wide(pattern)

    def measured(self, pattern: str) -> list[StoredProgram]:
        """Returns the programs that `tune` measured on this machine and stored in the user's cache."""
        artifact = self.artifact
        if not (artifact.whole and artifact.uses_stored_plans):
            return []
        return [
            StoredProgram(program, plan)
            for program, plan in plan_cache.find(
                artifact.manifest.digest, self.name, pattern, str(artifact.device)
            )
        ]

    def wide(self, pattern: str) -> list[StoredProgram]:
        """Returns the artifact's programs: those that were measured on this machine, else its other ones.

        If it has none for the pattern, the member programs are lowered.
        Raises: ArtifactError; LoweringError; UsageError.
        """
        artifact = self.artifact
        if artifact.uses_stored_plans and (stored := self._stored(pattern)):
            return stored
        try:
            return [StoredProgram(program, plan) for program, plan in self.lower(pattern)]
        except (LoweringError, UsageError) as e:
            if artifact.options.strategies is not None or not artifact.whole or pattern not in PATTERNS:
                raise
            raise ArtifactError(
                f"{self.inputs.title(pattern)} is not in the artifact, and cannot be made here: {e}"
            ) from e

    def _stored(self, pattern: str) -> list[StoredProgram]:
        """Returns the artifact's programs for this device: measured on this machine, else by rules of
        thumb.
        """
        artifact = self.artifact
        files = artifact.manifest.files
        return [
            StoredProgram(artifact.reader.program(w.file), p, files[w.file].sha256)
            for w, p in self._stored_plans(pattern)
        ]

    def stored_plans(self, pattern: str) -> list[Plan]:
        """Returns the plans of a pattern that are in the cache or in the artifact, without their programs:
        measured on this machine, else by rules of thumb.
        """
        if not self.artifact.uses_stored_plans:
            return []
        return [s.plan for s in self.measured(pattern)] or [p for _, p in self._stored_plans(pattern)]

    def _stored_plans(self, pattern: str) -> list[tuple[WideProgram, Plan]]:
        """Returns the rows of the manifest that `_stored` reads, with their plans."""
        artifact = self.artifact
        device = artifact.device.type
        every = [
            w for w in self.entry.wide if (w.pattern, w.device) == (pattern, device) and artifact.serves(w)
        ]
        rows = [(w, Plan.from_json(w.plan)) for w in every]
        return of_this_machine(rows, str(artifact.device))

    def by_rules(self, pattern: str) -> list[StoredProgram]:
        """Returns the artifact's programs by rules of thumb for this device; none if they cannot run."""
        artifact = self.artifact
        if not artifact.uses_stored_plans:
            return []
        rows = [
            w
            for w in self.entry.wide
            if (w.pattern, w.device) == (pattern, artifact.device.type) and artifact.serves(w)
        ]
        return [
            StoredProgram(artifact.reader.program(w.file), plan, artifact.manifest.files[w.file].sha256)
            for w in rows
            if not (plan := Plan.from_json(w.plan)).machine
        ]

    def difference_of_stored(self) -> str:
        """Returns which of the artifact's programs that calls run is not what its member programs become.

        Each is lowered again by its own plan. "" if all are equal, or if calls run programs that were made
        here. An artifact of another version may have other programs.
        """
        from ..lowering.relower import relowered  # imports the rules, which only lowering needs

        artifact, inputs = self.artifact, self.inputs
        for pattern in PATTERNS:
            if not artifact.uses_stored_plans or self.measured(pattern):
                continue
            stored = self._stored(pattern)
            if not stored:
                continue
            programs = [artifact.program(f, self.name) for f in self.entry.member]
            signatures = [self.entry.signatures[i] for i in artifact.chosen]
            self.admission.check_member_programs(pattern, programs, signatures)
            kinds: dict[str, Kind] = {w.name: w.kind for w in artifact.stored_rows}  # type: ignore[misc]
            try:
                made = relowered(
                    programs,
                    signatures,
                    kinds,
                    inputs.per_member(pattern),
                    dict(inputs.example),
                    [s.plan for s in stored],
                    artifact.factors,
                )
                same = [
                    canonical(a.to_json()) == canonical(b.program.to_json()) for a, b in zip(made, stored)
                ]
            except (LoweringError, UsageError) as e:
                return f"a program of pattern {pattern} cannot be made again: {str(e).splitlines()[0]}"
            if not all(same):
                least, most = stored[same.index(False)].plan.batch
                batches = f"batch {least} to {most}" if most else f"batches from {least}"
                return (
                    f"the program of pattern {pattern}, {batches}, is not the one that this version makes of "
                    "the member programs; build the artifact again"
                )
        return ""

    def lower(self, pattern: str, strategies: Sequence[str] = ()) -> list[tuple[Program, Plan]]:
        """Lowers the member programs of the loaded members for a pattern.

        strategies: those to prefer; default those of the load. Entries over the same files and kinds of
        inputs are lowered once in a load. Raises: LoweringError; UsageError.
        """
        from ..lowering.relower import relower  # imports the rules, which only lowering needs

        artifact, inputs = self.artifact, self.inputs
        programs = [artifact.program(f, self.name) for f in self.entry.member]
        signatures = [self.entry.signatures[i] for i in artifact.chosen]
        per_member = inputs.per_member(pattern)
        self.admission.check_member_programs(pattern, programs, signatures)
        lowering = artifact.limits.lowering
        key = (
            tuple(self.entry.member),
            tuple(per_member),
            tuple(inputs.example.items()),
            inputs.letter,
            pattern,
            self.plain,
            tuple(signatures),
            tuple(strategies),
        )
        if key not in lowering.made:
            kinds: dict[str, Kind] = {w.name: w.kind for w in artifact.stored_rows}  # type: ignore[misc]
            with lowering.within(self.entry.member, [len(p.nodes) for p in programs]):
                lowering.made[key] = relower(
                    programs,
                    signatures,
                    kinds,
                    per_member,
                    dict(inputs.example),
                    inputs.letter,
                    artifact.device.type,
                    pattern,
                    list(strategies) or artifact.options.strategies or "auto",
                    artifact.options.simplify,
                    self.plain,
                    artifact.factors,
                )
        found: list[tuple[Program, Plan]] = lowering.made[key]
        return found
