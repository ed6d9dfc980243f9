"""Checks programs of an artifact against the budget of the load, before they run."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from widepack_artifacts import strict_json
from widepack_artifacts.program import Program

from ..runtime.admission import admit, check_outputs, check_slots
from ..runtime.budget import Budget
from ..spec.entries import PATTERNS
from ..system import user_cache
from .bound_program import WalkCost
from .entry_inputs import EntryInputs


class ProgramAdmission:
    """Checks the programs of one entry."""

    def __init__(self, inputs: EntryInputs) -> None:
        self.inputs = inputs
        self.artifact, self.entry = inputs.artifact, inputs.entry
        self._table = {w.name: w for w in inputs.artifact.stored_rows}

    def check_slots(self, pattern: str, program: Program) -> None:
        """Checks that a wide program reads the manifest's weights and is of this entry. Raises:
        ArtifactError.
        """
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
        """Returns inputs of a call: the probe's, else of the example's sizes. values: False allows the meta
        device.
        """
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
        from ..runtime.walk import NeedsValues, Walk

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
