"""Rewrites one entry of an artifact for other members: lowers it again, verifies it, and writes it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from widepack_artifacts import weights as weight_files
from widepack_artifacts.entry import Entry
from widepack_artifacts.file_list import File
from widepack_artifacts.reader import Reader
from widepack_artifacts.wide_program import WideProgram
from widepack_artifacts.writer import Writer

from ..building.provenance import PART_COUNTS
from ..building.write import output_kinds, write_exported, write_wides
from ..errors import UsageError, VerificationError
from ..lowering.wide_programs import LoweredProgram, make_wide_programs, same_programs
from ..planning import plan_cache
from ..planning.plan import Plan
from ..planning.request import StrategyRequest
from ..simplify.factored_weights import stored_factors
from ..spec.entries import PATTERNS
from ..spec.member_parts import parts_in
from ..spec.state import BUFFER
from ..verification import probe
from ..verification.record import entry_record
from .artifact_entry import ArtifactEntry
from .prove import ProgramToProve, Proof, ProofContext
from .slots import MemberSlot
from .weights import RevisedTable


class RevisedEntry:
    """An entry of an artifact for the revised members.

    change: why the entry's wide programs must be lowered again; "" if they stay. measured: the rows of the
    measured plans that stay. left_out: the measured plans that do not, and why.
    """

    def __init__(
        self,
        name: str,
        row: Entry,
        reader: Reader,
        table: RevisedTable,
        slots: Sequence[MemberSlot],
        probed: weight_files.Weights | None,
    ) -> None:
        self.name, self.row, self.reader = name, row, reader
        by_name = {w.name: w for w in table.weights}
        programs = [reader.program(f) for f in row.member]
        factors = stored_factors([f.weight for f in table.factored], by_name)
        self.entry = ArtifactEntry(name, row, programs, [s.like for s in slots], by_name, probed, factors)
        self.change = self._change()
        measured = [w for w in row.wide if w.plan.get("machine")]
        self.measured = [] if self.change else measured
        self.left_out = self.left_out_lines(measured, self.change) if self.change else []

    def _change(self) -> str:
        """Returns why the wide programs must be lowered again; "" if they stay."""
        manifest, entry = self.reader.manifest, self.entry
        if entry.count != len(manifest.members):
            return f"measured with {len(manifest.members)} members, and there are {entry.count}"
        before = {w.name: w for w in manifest.weights}
        if any(before[n] != entry.table[n] for n in entry.reads_stored()):
            return "measured with weights of other kinds or shapes"
        if [self.row.member[s] for s in self.row.signatures] != [entry.files[s] for s in entry.signatures]:
            return "measured with other shapes of the members"
        return ""

    def left_out_lines(self, rows: Iterable[WideProgram], why: str) -> list[str]:
        """Returns a line for each measured plan that is left out."""
        lines = []
        for w in rows:
            plan = Plan.from_json(w.plan)
            most = "any" if w.batch[1] is None else w.batch[1]
            lines.append(
                f"{self.name}, {w.pattern}, batch {w.batch[0]} to {most}, {plan.machine},"
                f" {plan.threads} threads: {why}"
            )
        return lines

    def lower(self, strategies: StrategyRequest) -> list[LoweredProgram]:
        """Returns new wide programs by rules of thumb; none if those of the artifact stay.

        They are plain ones if the build needed plain ones.
        """
        if not self.change:
            return []
        plain = any(w.plan.get("plain") for w in self.row.wide)
        return self._lowered(replace(strategies, plain=plain))

    def _parts(self) -> list[range]:
        """Returns the parts of the members that have programs of their own, in as many divisions as before.

        Divisions into more parts than members are left out.
        """
        counts = self.reader.manifest.provenance.get(PART_COUNTS)
        known = counts if isinstance(counts, list) else []
        fitting = [c for c in known if type(c) is int and 2 <= c <= self.entry.count]
        return parts_in(list(self.entry.table.values()), self.entry.count, fitting)

    def _lowered(self, strategies: StrategyRequest) -> list[LoweredProgram]:
        targets = dict.fromkeys(w.device for w in self.row.wide if not w.plan.get("machine"))
        return make_wide_programs(self.entry, strategies, list(targets) or ["cpu"], self._parts())

    def prove(self, wides: Sequence[LoweredProgram], context: ProofContext) -> ProvedRevision:
        """Makes all comparisons of this entry. wides: its new wide programs. Raises: VerificationError."""
        # The manifest does not store whether a state is returned or changed in place, so only a member whose
        # states
        # are buffers can be called as its own module.
        modules = context.modules if all(s.how == BUFFER for s in self.entry.states) else {}
        proof = Proof(self.entry, context, modules)
        wides = list(wides)
        try:
            compared, failed = proof.check(self._programs(wides))
        except VerificationError:
            others = self._lowered(replace(context.strategies, plain=True))
            if same_programs(others, wides) or any(w.plan.get("plain") for w in self.row.wide):
                raise
            wides = others
            compared, failed = proof.check(self._programs(wides))
        files = self.reader.manifest.files
        reasons = {id(w): failed.get(_key(w, files), "") for w in self.measured}
        left_out = [
            line
            for why in dict.fromkeys(failed.values())
            for line in self.left_out_lines((w for w in self.measured if reasons[id(w)] == why), why)
        ]
        kept = [s.name for s in context.slots if s.new is None]
        before = entry_record(self.reader.manifest.verification, self.name)
        return ProvedRevision(
            revised=self,
            wides=wides,
            measured=[w for w in self.measured if not reasons[id(w)]],
            left_out=[*self.left_out, *left_out],
            record=proof.record(compared, before, kept),
            probe=proof.probe(),
            modules_compared=bool(modules),
        )

    def _programs(self, wides: Sequence[LoweredProgram]) -> list[ProgramToProve]:
        """Returns the wide programs to verify, each once: those by rules of thumb, then the measured ones."""
        files = self.reader.manifest.files
        stored = [w for w in self.row.wide if not w.plan.get("machine")] if not wides else []
        rules = {_key(w, files): w for w in stored}
        parts: dict[str, dict[range, None]] = {key: {} for key in rules}
        for w in stored:
            if w.part is not None:
                parts[_key(w, files)][w.part] = None
        programs = [
            ProgramToProve(w.pattern, w.lowered.program, w.plan, lowered=w.lowered, members=w.members)
            for w in wides
        ]
        programs += [
            ProgramToProve(
                w.pattern, self.reader.program(w.file), Plan.from_json(w.plan), members=list(parts[key])
            )
            for key, w in rules.items()
        ]
        measured = {_key(w, files): w for w in self.measured if _key(w, files) not in rules}
        return programs + [
            ProgramToProve(w.pattern, self.reader.program(w.file), Plan.from_json(w.plan), key)
            for key, w in measured.items()
        ]


@dataclass(frozen=True)
class ProvedRevision:
    """A verified entry of a revised artifact.

    wides: its new wide programs; empty if those of the artifact stay. measured, left_out: as in
    `RevisedEntry`, after the verification. record: of the comparisons, for the manifest. modules_compared:
    whether new members' own modules were compared with the captured program.
    """

    revised: RevisedEntry
    wides: list[LoweredProgram]
    measured: list[WideProgram]
    left_out: list[str]
    record: dict[str, Any]
    probe: dict[str, probe.Answers]
    modules_compared: bool

    @property
    def name(self) -> str:
        """The name of the entry."""
        return self.revised.name

    def carry_plans(self, before: str, after: str) -> list[str]:
        """Copies the plans in the user's cache to the new artifact if its programs are the same.

        before, after: the digests of the artifacts. Returns: a line for each plan that is left out.
        """
        left_out = []
        devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        for pattern, device in itertools.product(PATTERNS, devices):
            # Without a writable cache only a measurement is lost.
            with contextlib.suppress(OSError, UsageError):
                if not self.wides:
                    plan_cache.carry(before, after, self.name, pattern, device)
                elif plan_cache.find(before, self.name, pattern, device):
                    why = self.revised.change or "its programs were lowered again"
                    left_out.append(f"{self.name}, {pattern}, {device}, kept in your cache: {why}")
        return left_out

    def write(self, writer: Writer, reader: Reader) -> Entry:
        """Writes the new programs, or keeps those of the artifact, and returns the entry's row."""
        row, entry = self.revised.row, self.revised.entry
        writer.take(reader, [*entry.files, *(w.file for w in self.measured)])
        rows = row.rows if set(entry.files) <= set(row.member) else None  # new programs were not examined
        row = replace(row, member=entry.files, signatures=list(entry.signatures), rows=rows)
        if not self.wides:
            rules = [w for w in row.wide if not w.plan.get("machine")]
            writer.take(reader, [*(w.file for w in rules), *row.pt2.values()])
            kept = {id(w) for w in (*rules, *self.measured)}
            return replace(row, wide=tuple(w for w in row.wide if id(w) in kept))
        return replace(
            row,
            outputs=tuple(replace(o, kind=kind) for o, kind in zip(row.outputs, output_kinds(self.wides))),
            wide=(*write_wides(writer, self.name, self.wides), *self.measured),
            pt2=write_exported(writer, entry, self.wides, row.pt2),
        )


def _key(wide: WideProgram, files: Mapping[str, File]) -> str:
    """Returns a key that is equal for equal programs of one pattern, for all members or for parts."""
    return f"{wide.pattern} {files[wide.file].sha256}{' part' if wide.part is not None else ''}"
