"""Finds the wide programs of an entry: in the user's cache, in the artifact, or by lowering the member
programs.

`ProgramAdmission` checks programs of an artifact against the budget of the load, before they run.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from widepack_artifacts import strict_json
from widepack_artifacts.program import Program
from widepack_artifacts.strict_json import canonical
from widepack_artifacts.wide_program import WideProgram

from ...errors import ArtifactError, LoweringError, UsageError
from ...planning import plan_cache
from ...planning.plan import Plan, of_this_machine
from ...runtime.admission import admit, check_outputs, check_slots
from ...runtime.budget import Budget
from ...spec.entries import PATTERNS
from ...system import user_cache
from .bound_program import StoredProgram, WalkCost, within
from .entry_inputs import EntryInputs


class ProgramAdmission:
    """Checks the programs of one entry."""

    def __init__(self, inputs: EntryInputs) -> None:
        self.inputs = inputs
        self.artifact, self.entry = inputs.artifact, inputs.entry
        self._table = {w.name: w for w in inputs.artifact.stored_rows}

    def check_slots(self, pattern: str, program: Program) -> None:
        """Checks that a program reads the manifest's weights and is of this entry. Raises: ArtifactError."""
        title = self.inputs.title(pattern)
        check_slots(title, program, self.entry, self._table, len(self.artifact.chosen))

    def check(self, pattern: str, program: Program, weights: Mapping[str, Any], content: str) -> None:
        """Checks a wide program against the budget, unless it has passed on this machine.

        content: identifies the program; "" for its digest. Raises: ArtifactError.
        """
        artifact = self.artifact
        artifact.justify(s.source for s in program.weights)
        budget = artifact.limits.budget
        if budget is None:
            return
        title, key = self.inputs.title(pattern), self._cache_key(pattern, program, content)
        budget.add_nodes(title, program.node_count)
        cost = WalkCost.read(user_cache.noted(key, "walks"))
        if cost is not None:  # it passed alone, but it takes a part of what all programs of a load may take
            budget.spent += cost.work
            budget.admit(title, budget.spent, budget.resident + cost.bytes)
            return
        before = budget.spent
        outputs, peak = admit(
            budget,
            title,
            program,
            weights,
            lambda values: self._example(pattern, values, budget),
            artifact.device,
            artifact.options.prologue,
        )
        check_outputs(title, program, outputs, self.entry, len(artifact.chosen))
        user_cache.remember(key, "walks", WalkCost(budget.spent - before, peak).write())

    def _cache_key(self, pattern: str, program: Program, content: str) -> str:
        """Returns the key of a walk in the user's cache."""
        artifact = self.artifact
        digest = content or strict_json.digest(program.to_json())
        return user_cache.cache_key(
            artifact.manifest.digest,
            f"{self.inputs.name} {pattern} {digest} {artifact.chosen}",
            artifact.files_key,  # values may decide the sizes of results
            str(artifact.device),
            str(artifact.options.prologue),
            str(artifact.limits.limit),
            "probe" if self._reads_probe(pattern) else "example",  # the sizes that were checked
        )

    def _reads_probe(self, pattern: str) -> bool:
        artifact = self.artifact
        return artifact.options.verified and pattern in PATTERNS and artifact.probe is not None

    def _example(self, pattern: str, values: bool, budget: Budget) -> list[Tensor]:
        """Returns inputs: the probe's, or of the example's sizes. values: False allows the meta device."""
        artifact, inputs = self.artifact, self.inputs
        if self._reads_probe(pattern):
            return inputs.of_probe(pattern)
        found = inputs.without_values(pattern, budget, len(artifact.chosen))
        return inputs.drawn(pattern, inputs.example) if values else found

    def check_member_programs(
        self, pattern: str, programs: Sequence[Program], signatures: Sequence[int]
    ) -> None:
        """Checks member programs at the example's sizes, before lowering turns sizes into expressions.

        signatures: for each loaded member the number of its program. Raises: ArtifactError.
        """
        artifact = self.artifact
        if artifact.limits.budget is None:
            return
        from ...runtime.walk import NeedsValues, Walk

        for k in sorted(set(signatures)):
            title = f"{artifact.reader.root}: the member program {k} of entry {self.inputs.name}"
            number = artifact.chosen[signatures.index(k)]
            artifact.justify(s.source for s in programs[k].weights)
            weights = [artifact.weights.for_sizes(s.source, number) for s in programs[k].weights]
            budget = artifact.limits.budget
            walk = Walk(replace(budget), title, artifact.device)
            # Values that are needed decide sizes that nobody knows, neither here nor in lowering.
            with contextlib.suppress(NeedsValues):
                walk.run(programs[k], [*weights, *self.inputs.without_values("shared", budget, 0)])
            budget.walked = walk.budget.walked


def _by_batch(rows: Iterable[tuple[WideProgram, Plan]]) -> list[tuple[WideProgram, Plan]]:
    """Returns rows with the smallest batch first. A manifest has those of one program together."""
    return sorted(rows, key=lambda row: row[1].batch[0])


def _serve_here(plans: Sequence[Plan]) -> bool:
    """Returns whether none of the plans was predicted for another machine, and not measured here.

    Raises: UsageError if a variable of the environment names no kernel times.
    """
    predicted = {plan.predicted for plan in plans if plan.predicted and not plan.machine}
    if not predicted:
        return True
    from ...kernel_times.sources import profile_here  # imports JSON profiles, which only predictions need

    return predicted == {profile_here().machine}


class ProgramSource:
    """The wide programs and the member programs of one entry."""

    def __init__(self, inputs: EntryInputs, admission: ProgramAdmission) -> None:
        self.inputs, self.admission = inputs, admission
        self.artifact, self.entry, self.name = inputs.artifact, inputs.entry, inputs.name

    @property
    def plain(self) -> bool:
        """Whether the artifact's plans have no packed convolutions, whose answers were not right."""
        return any(w.plan.get("plain") for w in self.entry.wide)

    def member(self, place: int) -> tuple[Program, list[Any]]:
        """Returns a loaded member's own program, and a value for each of its weights."""
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
            lowered = [StoredProgram(program, plan) for program, plan in self._predicted_here(pattern)]
            return self._as_measured(pattern, lowered)
        except (LoweringError, UsageError) as e:
            if others := self.predicted_elsewhere(pattern):
                return others
            if artifact.options.strategies is not None or not artifact.whole or pattern not in PATTERNS:
                raise
            raise ArtifactError(
                f"{self.inputs.title(pattern)} is not in the artifact, and cannot be made here: {e}"
            ) from e

    def _predicted_here(self, pattern: str) -> list[tuple[Program, Plan]]:
        """Returns what `lower` does. The user's cache keeps it for an artifact whose plans were predicted for
        another machine, since lowering and planning take a load a second or more.
        """
        artifact = self.artifact
        if not (artifact.uses_stored_plans and artifact.whole and self._rows(pattern)):
            return self.lower(pattern)
        from ...kernel_times.sources import profile_here

        profile = profile_here()
        place = (artifact.manifest.digest, self.name, pattern, str(artifact.device))
        times = f"predicted: {profile.machine}, {profile.threads}, {profile.date}"
        if not (found := plan_cache.find(*place, times)):
            found = self.lower(pattern)
            with contextlib.suppress(OSError, UsageError):  # the next load makes them again
                plan_cache.keep(*place, found, times)
        return found

    def _as_measured(self, pattern: str, lowered: list[StoredProgram]) -> list[StoredProgram]:
        """Returns programs of a pattern, or of some members, of which the artifact has none.

        At the batches at which the artifact's own plan is a loop over its members on another backend, this is
        a loop on that backend, too: its time is in proportion to the members. The lowered programs serve the
        other batches, and stand in where that backend is missing.
        """
        options = self.artifact.options
        plans = self.measured_plans("shared" if pattern == "shared" else "each")
        if options.backend != "auto" or options.int8:
            return lowered
        if not any(p.backend and p.runs_member_after_member for p in plans):
            return lowered
        program, loop = self.lower(pattern, ("loop",))[0]
        found: list[StoredProgram] = []
        for plan in sorted(plans, key=lambda p: p.batch[0]):
            inside = within(lowered, plan.batch)
            if not (plan.backend and plan.runs_member_after_member and inside):
                found += inside
                continue
            chosen = replace(loop, batch=plan.batch, backend=plan.backend, workers=plan.workers)
            found.append(StoredProgram(program, chosen))
            found.append(replace(inside[0], plan=replace(inside[0].plan, batch=plan.batch)))
        return found

    def _stored(self, pattern: str) -> list[StoredProgram]:
        """Returns the artifact's programs for this device: measured here, else not measured; none if plans
        were predicted for another machine.
        """
        rows = of_this_machine(self._rows(pattern), str(self.artifact.device))
        return [self._read(row, plan) for row, plan in rows] if _serve_here([p for _, p in rows]) else []

    def predicted_elsewhere(self, pattern: str) -> list[StoredProgram]:
        """Returns the artifact's programs whose plans were predicted for another machine: right, but perhaps
        slow here; none if its plans serve this machine.
        """
        plans = [plan for _, plan in self._rows(pattern) if not plan.machine]
        return [] if _serve_here(plans) else self.not_measured(pattern)

    def stored_plans(self, pattern: str) -> list[Plan]:
        """Returns the plans of a pattern that are in the cache or in the artifact, without their programs:
        measured on this machine, else not measured.
        """
        if not self.artifact.uses_stored_plans:
            return []
        rows = of_this_machine(self._rows(pattern), str(self.artifact.device))
        return [s.plan for s in self.measured(pattern)] or [plan for _, plan in rows]

    def measured_plans(self, pattern: str) -> list[Plan]:
        """Returns the plans of a pattern that were measured on this machine for all members of the artifact,
        whichever are loaded; none for another dtype, or if strategies are requested.
        """
        artifact = self.artifact
        if not artifact.uses_stored_plans:
            return []
        device = str(artifact.device)
        kept = plan_cache.find(artifact.manifest.digest, self.name, pattern, device)
        if kept:
            return [plan for _, plan in kept]
        wanted = pattern, artifact.device.type
        rows = [w for w in self.entry.wide if (w.pattern, w.device) == wanted and w.part is None]
        plans = of_this_machine(_by_batch((w, Plan.from_json(w.plan)) for w in rows), device)
        return [plan for _, plan in plans if plan.machine]

    def not_measured(self, pattern: str) -> list[StoredProgram]:
        """Returns the artifact's programs for this device that were not measured; none if they cannot run."""
        if not self.artifact.uses_stored_plans:
            return []
        return [self._read(row, plan) for row, plan in self._rows(pattern) if not plan.machine]

    def _rows(self, pattern: str) -> list[tuple[WideProgram, Plan]]:
        """Returns the rows of the manifest for the device and the loaded members, with their plans, smallest
        batch first.
        """
        wanted = pattern, self.artifact.device.type
        rows = (w for w in self.entry.wide if (w.pattern, w.device) == wanted and self.artifact.serves(w))
        return _by_batch((w, Plan.from_json(w.plan)) for w in rows)

    def _read(self, row: WideProgram, plan: Plan) -> StoredProgram:
        reader = self.artifact.reader
        return StoredProgram(reader.program(row.file), plan, reader.manifest.files[row.file].sha256)

    def _members(self, pattern: str) -> tuple[list[Program], list[int]]:
        """Returns the member programs, checked, and the number of the program of each loaded member."""
        programs = [self.artifact.program(f, self.name) for f in self.entry.member]
        signatures = [self.entry.signatures[i] for i in self.artifact.chosen]
        self.admission.check_member_programs(pattern, programs, signatures)
        return programs, signatures

    def difference_of_stored(self) -> str:
        """Returns which of the artifact's programs that calls run is not what its member programs become.

        Each is lowered again by its own plan. "" if all are equal, or if calls run programs that were made
        here. An artifact of another version may have other programs.
        """
        from ...lowering.pattern_programs import simplified  # imports the rules, which only lowering needs

        artifact, inputs = self.artifact, self.inputs
        for pattern in PATTERNS:
            if not artifact.uses_stored_plans or self.measured(pattern):
                continue
            stored = self._stored(pattern)
            if not stored:
                continue
            stacked, example = inputs.per_member(pattern), dict(inputs.example)
            members = self._members(pattern)
            try:
                simple = simplified(
                    *members,
                    artifact.kinds,
                    stacked,
                    example,
                    inputs.letter,
                    pattern,
                    factors=artifact.factors,
                )
                same = [
                    canonical(simple.lower(s.plan).program.to_json()) == canonical(s.program.to_json())
                    for s in stored
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

    def _name_unused(self, pattern: str, preferred: Sequence[str], used: Collection[str]) -> None:
        """Warns of strategies of the load that run no node. used: the strategies of all nodes."""
        if unused := [name for name in preferred if name not in used]:
            warnings.warn(
                f"{self.inputs.title(pattern)}: strategies={', '.join(unused)} runs no node: no op of it has "
                "that strategy, or its plan is a loop in which it has no form. `widepack trace` shows the "
                "strategy of each node",
                stacklevel=3,
            )

    def lower(self, pattern: str, strategies: Sequence[str] = ()) -> list[tuple[Program, Plan]]:
        """Lowers the member programs of the loaded members for a pattern.

        strategies: those to prefer; default those of the load. Entries over the same files and kinds of
        inputs are lowered once in a load. Raises: LoweringError; UsageError.
        """
        # these import the rules, which only lowering needs
        from ...lowering.pattern_programs import simplified
        from ...planning.request import StrategyRequest

        artifact, inputs = self.artifact, self.inputs
        programs, signatures = self._members(pattern)
        per_member = inputs.per_member(pattern)
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
            with lowering.within(self.entry.member, [len(p.nodes) for p in programs]):
                simple = simplified(
                    programs,
                    signatures,
                    artifact.kinds,
                    per_member,
                    dict(inputs.example),
                    inputs.letter,
                    pattern,
                    artifact.options.simplify,
                    artifact.factors,
                )
                wanted = StrategyRequest.parse(list(strategies) or artifact.options.strategies or "auto")
                chosen = simple.plans(artifact.device.type, replace(wanted, plain=self.plain))
                lowered = [simple.lower(plan) for plan in chosen]
                lowering.made[key] = [(one.program, plan) for one, plan in zip(lowered, chosen)]
            if not strategies:
                used = {name for one in lowered for name in (*one.used.values(), *one.in_loops.values())}
                self._name_unused(pattern, wanted.preferred, used)
        found: list[tuple[Program, Plan]] = lowering.made[key]
        return found
