"""Runs one revision of an artifact: reads it, checks the new members, writes, verifies, and publishes.

The member programs of the artifact define the model, so the user's code is not needed. A new member is
checked against the artifact's weights table. Then

1. the weights files are written again (revised_weights.py);
2. if the number of members, a kind or a shape changes, the wide programs and torch.export programs of the
   affected entries are lowered again with predicted plans, and their measured plans are left out
   (revised_entry.py);
3. comparison (b) is made for all members, and the probe is computed again;
4. one rename publishes the result, so a reader sees the old artifact or the new one.

If the comparison of a new member fails, its extra state may be the cause (`explained`): the programs were
captured from members with other extra state, which forward may read.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from widepack_artifacts import manifest as form
from widepack_artifacts import weights as weight_files
from widepack_artifacts.costs import costs_file, stored_costs
from widepack_artifacts.entry import Entry
from widepack_artifacts.errors import some
from widepack_artifacts.file_list import graph_files
from widepack_artifacts.manifest import Member
from widepack_artifacts.reader import Reader
from widepack_artifacts.state_dicts import StateDicts
from widepack_artifacts.writer import Writer

from ..building.costs import artifact_facts, write_costs
from ..building.write import (
    SHARD_SIZE,
    MemberStates,
    WeightFiles,
    command_line,
    refuse_code,
    stored_extra,
    timestamp,
    write_factored,
    write_tensors,
)
from ..capture.pt2.factory import ExportedProgramFactory
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.discovery import MemberPlace
from ..checkpoints.extra_state import differing_names, extra_file, extra_of_member
from ..checkpoints.loading import filled
from ..checkpoints.new_member import NewMember, with_extra
from ..checkpoints.unused_names import unused_names
from ..errors import ArtifactError, MemberMismatch, UsageError, VerificationError
from ..fleet.open_member import open_new_member
from ..inference.calibration_record import CALIBRATION
from ..inference.load import check_opens
from ..ir.random_ops import uses_random_ops
from ..planning.request import StrategyRequest
from ..registry.registry import strategy_names
from ..runtime.admission import guarded
from ..spec.config import parse_size
from ..spec.entries import FORWARD
from ..spec.names import path_of
from ..system.autocast import plain_modes
from ..system.progress import Stages
from ..verification import probe
from ..verification.record import join_records
from ..verification.reference import not_finite
from ..version import __version__
from .request import MemberSlot, ReviseReport, ReviseRequest
from .revised_entry import Modules, RevisedEntry
from .revised_weights import new_table, rewrite

_TRIES = 5


@plain_modes()
def revise(request: ReviseRequest) -> ReviseReport:
    """Runs a revision.

    With `out`, another process may publish the artifact at `path` while it is read. The revision then starts
    again. Without `out` this process holds the artifact's lock.
    """
    path = path_of(request.path)
    if request.out is not None:
        path_of(request.out, "out")
    shard_bytes = None if request.max_shard_size is None else parse_size(request.max_shard_size)
    for left in reversed(range(_TRIES)):
        first = Reader(path)  # refuses a path without an artifact before anything is written
        try:
            # Without `out`, the writer's lock is held: no other process publishes while this one reads.
            with Writer(request.target, force=request.force or request.out is None) as writer:
                return Revision(request, writer, shard_bytes).run()
        except ArtifactError:
            if request.out is None or not left or not first.replaced():
                raise
    raise AssertionError("the last try returns or raises")


class Revision:
    """One revision of an artifact, while it runs.

    shard_bytes: the requested size of a weights file, or None. reader, old: the artifact before, and its
    manifest. slots: the members of the revised artifact. modules: makes the own modules of new members.
    table: the new weights table. entries: the entries for the new members.
    """

    def __init__(self, request: ReviseRequest, writer: Writer, shard_bytes: int | None) -> None:
        self.request, self.writer, self.shard_bytes = request, writer, shard_bytes
        self.stages = Stages(request.progress)
        self.reader = Reader(request.path)
        self.old = old = self.reader.manifest
        self._refuse_draws()
        with self.stages.stage("read"):
            files = self._old_weights()
            self.slots = request.slots_of(old, partial(self._open, files))
            self.modules = self._modules()
        with self.stages.stage("check"):
            # A damaged file must not get a new hash.
            others = [name for name in (old.probe, old.factored.corrections) if name]
            self.reader.check_hashes([*(p.name for p in self.reader.weights_files()), *others])
            files.check(old.weights, len(old.members))
            self.table = new_table(old, files, self.slots)
        probed = weight_files.Weights([self.reader.path(old.probe)]) if old.probe else None
        given = self.reader, self.table, self.slots, probed, _strategies_of(old)
        self.entries = [RevisedEntry(name, *given) for name in old.entries]

    @cached_property
    def members(self) -> tuple[Member, ...]:
        """The members' rows of the new manifest, with the hashes of new checkpoints."""
        rows = [self.old.members[s.place] for s in self.slots]
        return tuple(
            old if s.new is None else _row(s.name, s.new.checkpoint) for old, s in zip(rows, self.slots)
        )

    def _refuse_draws(self) -> None:
        """Refuses an artifact whose programs draw random numbers. Raises: UsageError."""
        for name, entry in self.old.entries.items():
            if any(uses_random_ops(self.reader.program(f)) for f in entry.member):
                raise UsageError(
                    f"{self.request.did}: entry {name} of {self.request.path} draws random numbers at every"
                    " call (dropout that is on), so its programs cannot be revised for other members: build"
                    " the artifact again"
                )

    def _old_weights(self) -> weight_files.Weights:
        """Opens the weights of the artifact."""
        factored = self.old.factored
        corrections = self.reader.path(factored.corrections) if factored.corrections else None
        return weight_files.Weights(self.reader.weights_files(), factored, corrections)

    def _open(self, files: weight_files.Weights, place: MemberPlace) -> NewMember:
        """Opens the checkpoint of a new member. files: the artifact's weights."""
        how = replace(self.request.how, key=place.key, part=place.part)
        return open_new_member(self.reader, files, place.path, how, base=self.request.base)

    def _modules(self) -> dict[int, Callable[[], nn.Module]]:
        """Returns what makes the new members' own modules, by the number of the member.

        It is the factory that the user names, or the torch.export program that is the checkpoint. Raises:
        UsageError.
        """
        found: dict[int, Callable[[], nn.Module]] = {}
        for i, slot in enumerate(self.slots):
            if slot.new is None:
                continue
            factory = self.request.how.factory(slot.new.checkpoint.path)
            if factory is not None:
                factory.dtype = slot.new.dtype
            elif slot.new.checkpoint.program is not None and list(self.old.entries) == [FORWARD]:
                factory = ExportedProgramFactory()
            if factory is not None:
                found[i] = partial(filled, factory, slot.new.aligned.checkpoints[0], slot.name)
        return found

    def run(self) -> ReviseReport:
        """Writes the weights, lowers and verifies the programs, and publishes the result."""
        title = f"{self.request.path}: a member program"
        with self.stages.stage("lower"), guarded(title):
            for entry in self.entries:
                entry.lower()
        with self.stages.stage("write weights"):
            files, way = rewrite(
                self.writer, self.reader, self.table, self.slots, self.shard_bytes, self.stages.step
            )
            factored = write_factored(self.writer, self.table.stored_factors)
        prove = partial(self._prove, WeightFiles.open(self.writer, files, factored))
        with self.stages.stage("verify"), guarded(title):
            try:
                prove(self.modules)
            except VerificationError as e:
                raise explained(e, self.request, self.reader, self.slots, prove) from e
        with self.stages.stage("export"):
            new = self._manifest()
        with self.stages.stage("publish"):
            history = self._history(any(e.modules_compared for e in self.entries))
            new = replace(new, factored=factored, provenance=self._provenance(history))
            check_opens(self.writer, new)
            manifest = self.writer.publish(new)
        left_out = [line for e in self.entries for line in e.left_out]
        left_out += [line for e in self.entries for line in e.carry_plans(self.old.digest, manifest.digest)]
        return self._report(manifest, history, left_out, way)

    def _prove(self, written: WeightFiles, modules: Modules) -> None:
        """Verifies all entries. Raises: VerificationError."""
        with warnings.catch_warnings():
            # Warnings of members at trial sizes do not concern the user.
            warnings.simplefilter("ignore")
            for entry in self.entries:
                entry.prove(written, modules, self.stages)

    def _records(self) -> dict[str, dict[str, Any]]:
        """Returns the records of the comparisons by entry."""
        return {e.entry: e.record for e in self.entries}

    def _manifest(self) -> form.Manifest:
        """Writes the programs and the probe, and returns the new manifest without its history."""
        entries = {e.entry: e.write(self.writer) for e in self.entries}
        calls = {place: answers for e in self.entries for place, answers in e.probe.items()}
        self._keep_derived(entries)
        tensors = probe.make(calls)
        records = {name: probe.fitted(name, record, tensors) for name, record in self._records().items()}
        return replace(
            self.old,
            state_dicts=self._state_dicts(),
            members=self.members,
            weights=self.table.weights,
            entries=entries,
            probe=write_tensors(self.writer, "probe", tensors) if self.old.probe else "",
            verification=join_records(records),
        )

    def _state_dicts(self) -> StateDicts:
        """Writes the extra states of the revised members, and returns the record of the manifest."""
        record, file = self.old.state_dicts, extra_file(self.reader)
        extra = []
        for slot in self.slots:
            if slot.new is not None:
                extra.append(stored_extra(slot.new.checkpoint.extra_state(), record.ignored))
            else:
                extra.append(extra_of_member(self.reader, file, slot.place))
            refuse_code(extra[-1], f"member {slot.name}")
        return MemberStates(record, extra).write(self.writer)

    def _keep_derived(self, entries: Mapping[str, Entry]) -> None:
        """Keeps the costs and the ONNX graphs of the artifact, which hold for any number of members. New
        kinds have others.
        """
        name = costs_file(self.old.files)
        same = all(entries[n].member == e.member for n, e in self.old.entries.items())
        if same and not self.table.changed:
            self.writer.take(self.reader, [*graph_files(self.old.files), *([name] if name else [])])
        elif name:
            known = [e for e in self.entries if e.entry in stored_costs(self.reader)]
            write_costs(self.writer, [(e.entry, e, artifact_facts(e)) for e in known])

    def _history(self, compared: bool) -> dict[str, Any]:
        """Returns the revision's row in the history of the artifact's provenance.

        compared: whether new members' own modules were compared with the captured program.
        """
        return {
            "did": self.request.did,
            "members": self._changed(),
            "kinds": self.table.changed,
            "from": self.old.digest,
            "command": command_line(),
            "date": timestamp(),
            "widepack": __version__,
            "torch": torch.__version__,
            "asked": [self.slots[i].name for i in sorted(self.modules)] if compared else [],
        }

    def _changed(self) -> list[dict[str, Any]]:
        """Returns a row for each member that was removed, replaced or added."""
        before = {m.name: {"left": m.source} for m in self.old.members}
        kept = {s.name for s in self.slots}
        removed: list[dict[str, Any]] = [{"member": n, **row} for n, row in before.items() if n not in kept]
        new = [m for m, slot in zip(self.members, self.slots) if slot.new is not None]
        return removed + [
            {"member": m.name, "source": m.source, "sha256": m.sha256, **before.get(m.name, {})} for m in new
        ]

    def _provenance(self, history: dict[str, Any]) -> dict[str, Any]:
        """Returns the provenance with one more row in its history, without the calibration of the members
        before.
        """
        before = self.old.provenance.get("history")
        return {
            **{k: v for k, v in self.old.provenance.items() if k != CALIBRATION},
            **({} if self.shard_bytes is None else {SHARD_SIZE: self.shard_bytes}),
            "history": [*(before if isinstance(before, list) else []), history],
        }

    def _report(
        self,
        manifest: form.Manifest,
        history: Mapping[str, Any],
        left_out: list[str],
        way: str,
    ) -> ReviseReport:
        return ReviseReport(
            path=os.fspath(self.request.target),
            did=self.request.did,
            members=tuple(s.name for s in self.slots),
            changed=history["members"],
            kinds=history["kinds"],
            lowered=[e.entry for e in self.entries if e.wides],
            left_out=left_out,
            written=way,
            asked=history["asked"],
            weights=self.table.bytes_by_kind,
            bytes_disk=sum(f.bytes for f in manifest.files.values()),
            seconds=self.stages.seconds,
            before=history["from"],
            digest=manifest.digest,
            verification=manifest.verification,
            not_finite=not_finite(self._records()),
            unused=unused_names(
                [s.new.checkpoint for s in self.slots if s.new is not None],
                (*manifest.state_dicts.ignored, *self.request.how.ignore),
            ),
            uncalibrated=CALIBRATION in self.old.provenance,
        )


def _strategies_of(manifest: form.Manifest) -> StrategyRequest:
    """Returns the strategies that the artifact was built with, as far as this version knows them."""
    names, known = manifest.provenance.get("strategy"), strategy_names()
    if not isinstance(names, list):
        return StrategyRequest()
    return StrategyRequest.parse([name for name in names if isinstance(name, str) and name in known])


def _row(name: str, checkpoint: Checkpoint) -> Member:
    """Returns the manifest's row of a new member."""
    return Member(name, checkpoint.label, checkpoint.sha256(), checkpoint.bytes)


def explained(
    error: VerificationError,
    request: ReviseRequest,
    reader: Reader,
    slots: Sequence[MemberSlot],
    prove: Callable[[Modules], object],
) -> VerificationError | MemberMismatch:
    """Returns the error to raise for a revision whose comparison failed.

    Args:
        error: The error of the comparison.
        request: The revision.
        reader: The artifact before it.
        slots: The members of the revised artifact.
        prove: Makes the comparison with other modules of new members.

    Returns:
        an error that names the extra state, if the comparison passes with that of a member; else `error`.
    """
    extra = extra_of_member(reader, extra_file(reader), 0)
    differing: dict[str, list[str]] = {}
    modules: dict[int, Callable[[], nn.Module]] = {}
    for i, slot in enumerate(slots):
        if slot.new is None or (factory := request.how.factory(slot.new.checkpoint.path)) is None:
            continue
        factory.dtype = slot.new.dtype
        modules[i] = partial(with_extra, factory, slot.new, extra)
        if names := differing_names(slot.new.checkpoint.extra_state(), extra):
            differing[slot.name] = names
    if not differing:
        return error
    try:
        prove(modules)
    except (VerificationError, MemberMismatch):
        return error
    name, names = next(iter(differing.items()))
    return MemberMismatch(
        f"member {name}: its extra state ({some(names)}) differs from that of the artifact's"
        " members, and forward depends on it: with their extra state and its own weights, it answers as the"
        " artifact's programs. Build the artifact again with this checkpoint"
    )
