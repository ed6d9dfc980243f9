"""Rewrites one entry of an artifact for other members: lowers it again, verifies it, and writes it.

The manifest stores what a build knows from its capture: inputs, dims, conditions, parameters, the form of the
result, states. The member programs define what a member computes, so the user's module is not needed. Example
inputs come from the probe.

Comparison (a) of a new member needs its own module. It is made if the caller names a factory, or if the
checkpoint is a torch.export program. Otherwise the comparison (a) of the build remains valid: the captured
program is the same.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from widepack_artifacts import weights as weight_files
from widepack_artifacts.entry import Entry
from widepack_artifacts.reader import Reader
from widepack_artifacts.wide_program import WideProgram
from widepack_artifacts.writer import Writer

from ..building.prove import ProgramToCheck, check_call, check_costs, check_programs, or_plain
from ..building.write import PART_COUNTS, WeightFiles, output_kinds, write_exported, write_wides
from ..errors import UsageError
from ..ir.tensor_type import parse_slot
from ..lowering.wide_programs import LoweredProgram, make_wide_programs
from ..planning import plan_cache
from ..planning.plan import Plan
from ..planning.request import StrategyRequest
from ..spec.draws import InputSource
from ..spec.entries import PATTERNS
from ..spec.member_parts import parts_in
from ..spec.state import BUFFER
from ..system.progress import Stages
from ..system.readahead import asking
from ..verification import answers, calls, probe
from ..verification.entries import ArtifactEntry
from ..verification.record import APPROXIMATION, entry_record
from ..verification.reference import ComparedOutputs, ReferenceAnswers
from ..verification.subject import CallCase, Subject, VerifiedCall, subject_of
from .request import MemberSlot
from .revised_weights import RevisedTable

Modules = Mapping[int, Callable[[], nn.Module]]
"""What makes the own modules of new members, by the number of the member."""


class RevisedEntry(ArtifactEntry):
    """An entry of an artifact for the revised members.

    member_slots: the revised members. probed: the tensors of the artifact's probe; None without a probe.
    strategies: those that the artifact was built with. change: why the wide programs must be lowered again;
    "" if they stay. measured, left_out: the rows of the measured plans that stay, and a line for each that
    does not. wides: the new wide programs, after `lower`; empty if those of the artifact stay. After `prove`:
    record: of the comparisons, for the manifest. probe: the probe's calls by pattern. modules_compared:
    whether new members' own modules were compared with the captured program.
    """

    def __init__(
        self,
        name: str,
        reader: Reader,
        table: RevisedTable,
        slots: Sequence[MemberSlot],
        probed: weight_files.Weights | None,
        strategies: StrategyRequest,
    ) -> None:
        factored = [f.weight for f in table.stored_factors]
        super().__init__(name, reader, [s.like for s in slots], table.weights, factored)
        self.member_slots, self.probed, row = slots, probed, self.row
        examples = [self._probe_input("each", k, 0) for k in range(len(row.inputs))]
        self.sources = [
            InputSource(x.name, x.type, x.low, x.high, None if example is None else example.clone())
            for x, example in zip(row.inputs, examples)
        ]
        self.change = self._change()
        self.measured = [w for w in row.wide if w.plan.get("machine")]
        self.left_out: list[str] = []
        if self.change:
            self.left_out, self.measured = self._lines(self.measured, self.change), []
        self.plain = any(w.plan.get("plain") for w in row.wide)
        self.strategies = replace(strategies, plain=self.plain)
        self.wides: list[LoweredProgram] = []

    def _change(self) -> str:
        """Returns why the wide programs must be lowered again; "" if they stay."""
        manifest = self.reader.manifest
        if self.count != len(manifest.members):
            return f"measured with {len(manifest.members)} members, and there are {self.count}"
        before = {w.name: w for w in manifest.weights}
        if any(before[n] != self.table[n] for n in self.reads_stored()):
            return "measured with weights of other kinds or shapes"
        if [self.row.member[s] for s in self.row.signatures] != [self.files[s] for s in self.signatures]:
            return "measured with other shapes of the members"
        return ""

    def reads_stored(self) -> set[str]:
        """Returns the names of the stored weights that the programs read and the states begin with."""
        read = {s.source for p in self.programs for s in p.weights}
        read |= {s.initial for s in self.row.state if s.initial}
        split = {name: self.factors[name] for name in read if name in self.factors}
        return (read - set(split)) | {part for f in split.values() for part in f.parts}

    def _lines(self, rows: Iterable[WideProgram], why: str) -> list[str]:
        """Returns a line for each measured plan that is left out."""
        lines = []
        for w in rows:
            plan = Plan.from_json(w.plan)
            most = "any" if w.batch[1] is None else w.batch[1]
            lines.append(
                f"{self.entry}, {w.pattern}, batch {w.batch[0]} to {most}, {plan.machine},"
                f" {plan.threads} threads: {why}"
            )
        return lines

    # ---------------------------------------------------------------- lowering

    def lower(self) -> None:
        """Makes new wide programs with predicted plans, if those of the artifact cannot stay."""
        if self.change:
            self.wides = self._lowered(self.strategies)

    def _lowered(self, strategies: StrategyRequest) -> list[LoweredProgram]:
        """Lowers the entry for the devices of the artifact, and in as many divisions of the members as
        before. Divisions into more parts than members are left out.
        """
        targets = dict.fromkeys(w.device for w in self.row.wide if not w.plan.get("machine"))
        counts = self.reader.manifest.provenance.get(PART_COUNTS)
        known = counts if isinstance(counts, list) else []
        fitting = [c for c in known if type(c) is int and 2 <= c <= self.count]
        parts = parts_in(list(self.table.values()), self.count, fitting)
        return make_wide_programs(self, strategies, list(targets) or ["cpu"], parts)

    def _plain_programs(self) -> list[LoweredProgram]:
        """Returns programs without channel-packed convolutions, or those that there are if they have none."""
        return self.wides if self.plain else self._lowered(replace(self.strategies, plain=True))

    # ---------------------------------------------------------------- verification

    def prove(self, written: WeightFiles, modules: Modules, stages: Stages) -> None:
        """Makes all comparisons of this entry. modules: of the new members that have modules of their own.

        Raises: VerificationError.
        """
        read = [self.table[name] for name in sorted(self.reads_stored())]
        subject = replace(self._subject(written.weights), readahead=asking(read, written.paths, self.count))
        probe_calls = self._probe_calls(subject)
        made = [*calls.calls(subject, PATTERNS), *probe_calls]
        reference = ReferenceAnswers(self, subject, written.weights, made, stages)
        # The manifest does not store whether a state is returned or changed in place, so only a member whose
        # states are buffers can be called as its own module.
        modules = modules if all(s.how == BUFFER for s in self.states) else {}
        captured = self._compare_modules(reference, modules)
        way_out = "Nothing was published; please report it"
        wides, (compared, failed) = or_plain(
            lambda some: check_programs(reference, self._programs(some), way_out),
            self.wides,
            self._plain_programs,
        )
        reasons = {id(w): failed.get(self._key(w), "") for w in self.measured}
        for why in dict.fromkeys(failed.values()):
            self.left_out += self._lines((w for w in self.measured if reasons[id(w)] == why), why)
        self.wides, self.measured = wides, [w for w in self.measured if not reasons[id(w)]]
        self.record = self._record(reference, compared, captured)
        self.probe = reference.probed(probe_calls)
        self.modules_compared = bool(modules)

    def _programs(self, wides: Sequence[LoweredProgram]) -> list[ProgramToCheck]:
        """Returns the wide programs to verify, each once: predicted plans before measured ones."""
        rules = [] if wides else [w for w in self.row.wide if not w.plan.get("machine")]
        stored: dict[str, ProgramToCheck] = {}
        for w in (*rules, *self.measured):
            key = self._key(w)
            if key not in stored:
                program, plan = self.reader.program(w.file), Plan.from_json(w.plan)
                stored[key] = ProgramToCheck(w.pattern, program, plan, may_fail=key if plan.machine else "")
            if w.part is not None and w.part not in stored[key].members:
                stored[key].members.append(w.part)
        return [*map(ProgramToCheck.of, wides), *stored.values()]

    def _key(self, wide: WideProgram) -> str:
        """Returns a key that is equal for equal programs of one pattern, for all members or for parts."""
        part = " part" if wide.part is not None else ""
        return f"{wide.pattern} {self.reader.manifest.files[wide.file].sha256}{part}"

    def _subject(self, files: weight_files.Weights) -> Subject:
        """Returns the subject of the comparisons, without modules. files: the members' weights."""
        title = f"a member program of entry {self.entry}"
        members = [s.name for s in self.member_slots]
        subject = subject_of(self, members, files, before=partial(check_costs, title))
        return replace(
            subject, sizes=self._call_sizes(), before_call=lambda inputs: check_call(title, subject, inputs)
        )

    def _call_sizes(self) -> dict[str, int]:
        """Returns sizes at which the example inputs form a valid call.

        Integers without bounds, for example indices, may fit only the sizes of the probe. Then these are
        returned, else the sizes of the manifest.
        """
        examples = [(s, s.example) for s in self.sources if s.example is not None]
        sizes = dict(self.sizes)
        if any(not x.is_floating_point() and (s.low is None or s.high is None) for s, x in examples):
            for source, example in examples:
                for size, dim in zip(example.shape, parse_slot(source.type).dims):
                    if not isinstance(dim, int):
                        sizes[dim.letter] = size // dim.factor
        return sizes

    def _probe_calls(self, subject: Subject) -> list[VerifiedCall]:
        """Returns the probe's calls for the revised members; empty without a probe.

        The probe keeps its inputs: if each revision drew inputs out of the last ones, all rows would become
        equal.
        """
        if self.probed is None:
            return []
        buffers = {s.input: s for s in self.states if s.how == BUFFER}
        made = []
        for pattern in PATTERNS:
            inputs: list[list[torch.Tensor]] = [[] for _ in self.member_slots]
            for k in range(len(self.sources)):
                stacked = pattern == "each" or k in subject.carried
                for i, slot in enumerate(self.member_slots):
                    value = (
                        subject.initial(i, buffers[k])
                        if k in buffers
                        else self._probe_input(pattern, k, slot.place if stacked else None)
                    )
                    if value is None:
                        return []
                    inputs[i].append(value.clone())
            made.append(VerifiedCall(CallCase(name="the probe"), pattern, inputs, True, subject.carried))
        return made

    def _probe_input(self, pattern: str, k: int, place: int | None) -> torch.Tensor | None:
        """Returns input k in the probe, of one member where it is stacked; None if the probe does not store
        it.
        """
        name = f"{probe.prefix(self.entry)}{pattern}.x{k}"
        if self.probed is None or name not in self.probed:
            return None
        value = self.probed.get(name)
        return value if place is None else value[place]

    def _compare_modules(self, reference: ReferenceAnswers, modules: Modules) -> list[dict[str, Any]]:
        """Makes comparison (a) of the members with own modules, and returns its record.

        Raises: VerificationError.
        """
        if not modules:
            return []
        numbers, every = sorted(modules), reference.subject
        chosen = replace(
            every,
            members=tuple(every.members[i] for i in numbers),
            signatures=[every.signatures[i] for i in numbers],
            weights=lambda i: every.weights(numbers[i]),
            module=lambda i: modules[numbers[i]](),
            initial=lambda i, state: every.initial(numbers[i], state),
            readahead=lambda some: every.readahead([numbers[i] for i in some]),
        )
        made = [replace(c, inputs=[c.inputs[i] for i in numbers]) for c in reference.own.calls]
        return [p.record() for p in answers.collect(chosen, made).captured]

    def _record(
        self,
        reference: ReferenceAnswers,
        compared: Mapping[str, ComparedOutputs],
        captured: Sequence[dict[str, Any]],
    ) -> dict[str, Any]:
        """Returns the record of the comparisons for the manifest.

        The artifact's comparison (a) stays, since the captured program does; of later comparisons (a), and of
        approximate weights, the rows of the members that are kept. captured: the comparisons (a) made now.
        """
        before = entry_record(self.reader.manifest.verification, self.entry)
        kept = [s.name for s in self.member_slots if s.new is None]
        again = [*_rows_of(before.get("capture_again"), kept), *captured]
        capture = {"capture": before.get("capture", []), **({"capture_again": again} if again else {})}
        near = before.get(APPROXIMATION)
        near = near if isinstance(near, dict) else {}
        rows = _rows_of(near.get("outputs"), kept)
        found = reference.record(capture, compared)
        return {**found, **({APPROXIMATION: {**near, "outputs": rows}} if rows else {})}

    # ---------------------------------------------------------------- the new artifact

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
                    plan_cache.carry(before, after, self.entry, pattern, device)
                elif plan_cache.find(before, self.entry, pattern, device):
                    why = self.change or "its programs were lowered again"
                    left_out.append(f"{self.entry}, {pattern}, {device}, kept in your cache: {why}")
        return left_out

    def write(self, writer: Writer) -> Entry:
        """Writes the new programs, or keeps those of the artifact, and returns the entry's row."""
        row, reader = self.row, self.reader
        writer.take(reader, [*self.files, *(w.file for w in self.measured)])
        rows = row.rows if set(self.files) <= set(row.member) else None  # new programs were not examined
        row = replace(row, member=self.files, signatures=list(self.signatures), rows=rows)
        if not self.wides:
            rules = [w for w in row.wide if not w.plan.get("machine")]
            writer.take(reader, [*(w.file for w in rules), *row.pt2.values()])
            kept = {id(w) for w in (*rules, *self.measured)}
            return replace(row, wide=tuple(w for w in row.wide if id(w) in kept))
        return replace(
            row,
            outputs=tuple(replace(o, kind=kind) for o, kind in zip(row.outputs, output_kinds(self.wides))),
            wide=(*write_wides(writer, self.entry, self.wides), *self.measured),
            pt2=write_exported(writer, self, self.wides, row.pt2),
        )


def _rows_of(rows: Any, members: Collection[str]) -> list[dict[str, Any]]:
    """Returns the rows of a record, reduced to these members. rows: from a manifest, of any type."""
    found = []
    for row in rows if isinstance(rows, list) else []:
        errors = row.get("members") if isinstance(row, dict) else None
        if isinstance(errors, dict) and (kept := {n: e for n, e in errors.items() if n in members}):
            found.append({**row, "members": kept})
    return found
