"""Verifies one entry of a revised artifact: comparison (b) of every wide program for all members, and the
probe.

Comparison (a) of a new member needs its own module. It is made if the caller names a factory, or if the
checkpoint is a torch.export program. Otherwise the comparison (a) of the build remains valid: the captured
program is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from widepack_artifacts.program import Program

from ..building.write import WeightFiles
from ..errors import VerificationError
from ..lowering.lower import Lowered
from ..planning.plan import Plan
from ..planning.request import StrategyRequest
from ..spec.entries import PATTERNS
from ..system.progress import Stages
from ..system.readahead import asking
from ..verification import answers, calls, probe
from ..verification.record import APPROXIMATION, program_key
from ..verification.reference import ComparedOutputs, ReferenceAnswers
from ..verification.tolerance import ErrorStats
from .artifact_entry import ArtifactEntry
from .slots import MemberSlot

Modules = Mapping[int, Callable[[], nn.Module]]
"""What makes the own modules of new members, by the number of the member."""


@dataclass(frozen=True)
class ProofContext:
    """What the verification of every entry of a revised artifact needs.

    written: the weights files. slots: the members. strategies: those that the artifact was built with.
    """

    written: WeightFiles
    slots: Sequence[MemberSlot]
    modules: Modules
    strategies: StrategyRequest
    stages: Stages


@dataclass(frozen=True)
class ProgramToProve:
    """A wide program to verify.

    plan: the plan that it was lowered by. measured: the hash of its file if only measured plans use it; such
    a program may fail and is then left out. lowered: None for a program of the artifact. members: the parts
    of the members that the program is for; none for all members.
    """

    pattern: str
    program: Program
    plan: Plan
    measured: str = ""
    lowered: Lowered | None = None
    members: Sequence[range] = ()


class Proof:
    """The members' answers, computed once, with which an entry's wide programs are compared.

    modules: of the new members whose own modules are compared with the captured program.

    Raises: VerificationError for a member that fails where others answer, and for a wrong capture.
    """

    def __init__(self, entry: ArtifactEntry, context: ProofContext, modules: Modules) -> None:
        slots, written = context.slots, context.written
        self._entry = entry
        subject = replace(
            entry.subject([s.name for s in slots], written.weights),
            readahead=asking(
                [entry.table[name] for name in sorted(entry.reads_stored())], written.paths, entry.count
            ),
        )
        self._probe_calls = entry.probe_calls([s.place for s in slots], subject)
        self._reference = ReferenceAnswers(
            entry,
            subject,
            written.weights,
            [*calls.calls(subject, PATTERNS), *self._probe_calls],
            context.stages,
        )
        self._captured = self._check_modules(modules)

    def _check_modules(self, modules: Modules) -> list[dict[str, Any]]:
        """Makes comparison (a) of the members with own modules, and returns its record.

        Raises: VerificationError.
        """
        numbers = sorted(modules)
        if not numbers:
            return []
        every = self._reference.subject
        chosen = replace(
            every,
            members=tuple(every.members[i] for i in numbers),
            signatures=[every.signatures[i] for i in numbers],
            weights=lambda i: every.weights(numbers[i]),
            module=lambda i: modules[numbers[i]](),
            initial=lambda i, state: every.initial(numbers[i], state),
            readahead=lambda some: every.readahead([numbers[i] for i in some]),
        )
        made = [replace(c, inputs=[c.inputs[i] for i in numbers]) for c in self._reference.calls]
        pools = [ErrorStats(o.name) for o in self._entry.row.outputs]
        return [p.record() for p in answers.collect(chosen, made, pools).captured]

    def check(self, programs: Sequence[ProgramToProve]) -> tuple[dict[str, ComparedOutputs], dict[str, str]]:
        """Makes comparison (b) of wide programs.

        Returns: the compared outputs, by pattern and number; and why measured programs failed, by their hash.
        Raises: VerificationError if any other program fails.
        """
        compared: dict[str, ComparedOutputs] = {}
        failed: dict[str, str] = {}
        for number, one in enumerate(programs):
            try:
                compared[program_key(one.pattern, number)] = self._reference.check(
                    one.pattern,
                    one.program,
                    one.plan,
                    one.lowered,
                    "Nothing was published; please report it",
                    one.members,
                )
            except VerificationError as e:
                if not one.measured:
                    raise
                failed[one.measured] = str(e)
        return compared, failed

    def record(
        self, compared: Mapping[str, ComparedOutputs], before: Mapping[str, Any], kept: Collection[str]
    ) -> dict[str, Any]:
        """Returns the record of the comparisons for the manifest.

        before: the record in the artifact. Its comparison (a) stays, since the captured program does; of
        later comparisons (a), and of approximate weights, the rows of the members that are kept. kept: the
        names of those members.
        """
        again = [*_rows_of(before.get("capture_again"), kept), *self._captured]
        capture = {"capture": before.get("capture", []), **({"capture_again": again} if again else {})}
        found = self._reference.record(capture, compared)
        near = before.get(APPROXIMATION)
        near = near if isinstance(near, dict) else {}
        rows = _rows_of(near.get("outputs"), kept)
        return {**found, **({APPROXIMATION: {**near, "outputs": rows}} if rows else {})}

    def probe(self) -> dict[str, probe.Answers]:
        """Returns the calls of the new probe, by pattern with the entry's prefix."""
        return self._reference.probed(self._probe_calls)


def _rows_of(rows: Any, members: Collection[str]) -> list[dict[str, Any]]:
    """Returns the rows of a record, reduced to these members. rows: from a manifest, of any type."""
    found = []
    for row in rows if isinstance(rows, list) else []:
        errors = row.get("members") if isinstance(row, dict) else None
        if isinstance(errors, dict) and (kept := {n: e for n, e in errors.items() if n in members}):
            found.append({**row, "members": kept})
    return found
