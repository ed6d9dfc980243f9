"""Runs one revision of an artifact: reads it, checks the new members, writes, verifies, and publishes.

The member programs of the artifact define the model, so the user's code is not needed. A new member is
checked against the artifact's weights table. Then

1. the weights files are written again (weights.py);
2. if the number of members, a kind or a shape changes, the wide programs and torch.export programs of the
   affected entries are lowered again by rules of thumb, and their measured plans are left out
   (revised_entry.py);
3. comparison (b) is made for all members, and the probe is computed again (prove.py);
4. one rename publishes the result, so a reader sees the old artifact or the new one.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from widepack_artifacts import manifest as form
from widepack_artifacts import weights as weight_files
from widepack_artifacts.costs_file import costs_file, stored_costs
from widepack_artifacts.entry import Entry
from widepack_artifacts.manifest import Member
from widepack_artifacts.reader import Reader
from widepack_artifacts.state_dicts import StateDicts
from widepack_artifacts.weight_table import KINDS
from widepack_artifacts.writer import Writer

from ..building.costs_file import write_revised_costs
from ..building.provenance import SHARD_SIZE, command_line, timestamp
from ..building.state_dicts import MemberStates, refuse_code, stored_extra
from ..building.write import WeightFiles, write_factored, write_tensors
from ..capture.pt2.factory import ExportedProgramFactory
from ..checkpoints.extra_state import extra_file, extra_of_member
from ..checkpoints.factory import Factory
from ..checkpoints.loading import filled
from ..checkpoints.new_member import NewMember
from ..checkpoints.unused_names import unused_names
from ..errors import ArtifactError, UsageError, VerificationError
from ..fleet.new_members import open_new_member
from ..fleet.orientation import of_programs
from ..inference.unpublished import check_opens
from ..ir.random_ops import uses_random_ops
from ..lowering.wide_programs import LoweredProgram
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
from .extra_state_cause import explained
from .prove import Modules, ProofContext
from .report import ReviseReport
from .request import ReviseRequest
from .revised_entry import ProvedRevision, RevisedEntry
from .slots import MemberSlot
from .weights import RevisedTable, new_table, rewrite

_TRIES = 5


@dataclass(frozen=True)
class CheckedRevision:
    """A revision whose new members were read and checked against the old artifact.

    slots: the members of the revised artifact. modules: makes the own modules of new members. table: the new
    weights table. entries: the entries for the new members.
    """

    slots: list[MemberSlot]
    modules: Modules
    table: RevisedTable
    entries: list[RevisedEntry]


@plain_modes()
def revise(request: ReviseRequest) -> ReviseReport:
    """Runs a revision.

    With `out`, another process may publish the artifact at `path` while it is read. The revision then starts
    again. Without `out` this process holds the artifact's lock.
    """
    path = path_of(request.path)
    if request.out is not None:
        path_of(request.out, "out")
    for left in reversed(range(_TRIES)):
        first = Reader(path)  # refuses a path without an artifact before anything is written
        try:
            return _revise_once(request)
        except ArtifactError:
            if request.out is None or not left or not first.replaced():
                raise
    raise AssertionError("the last try returns or raises")


def _revise_once(request: ReviseRequest) -> ReviseReport:
    shard_bytes = None if request.max_shard_size is None else parse_size(request.max_shard_size)
    stages = Stages(request.progress)
    with Writer(request.target, force=request.force or request.out is None) as writer:
        # Without `out`, the writer's lock is held: no other process publishes while this one reads.
        reader = Reader(request.path)
        strategies = _strategies_of(reader.manifest)
        checked = _checked(request, reader, stages)
        title = f"{request.path}: a member program"
        with stages.stage("lower"), guarded(title):
            wides = {e.name: e.lower(strategies) for e in checked.entries}
        with stages.stage("write weights"):
            files, way = rewrite(writer, reader, checked.table, checked.slots, shard_bytes, stages.step)
            rows = checked.table.factored
            factored = write_factored(writer, [r.weight for r in rows], (r.corrections for r in rows))
        context = ProofContext(
            WeightFiles.open(writer, files, factored), checked.slots, checked.modules, strategies, stages
        )
        with stages.stage("verify"), guarded(title):
            try:
                proved = _proved(checked, wides, context)
            except VerificationError as e:
                again = partial(_proved_with, checked, wides, context)
                raise explained(e, request, reader, checked.slots, again) from e
        new = _exported(reader, checked, proved, writer, stages)
        with stages.stage("publish"):
            history = _history(request, reader.manifest, checked, proved)
            new = _with_history(replace(new, factored=factored), history, shard_bytes)
            check_opens(writer, new)
            manifest = writer.publish(new)
    left_out = [line for p in proved for line in p.left_out]
    for one in proved:
        left_out += one.carry_plans(reader.manifest.digest, manifest.digest)
    return _report(request, manifest, history, checked, proved, left_out, way, stages)


def _checked(request: ReviseRequest, reader: Reader, stages: Stages) -> CheckedRevision:
    """Reads the new members and checks them against the artifact, whose files are checked too."""
    old = reader.manifest
    for name, entry in old.entries.items():
        if any(uses_random_ops(reader.program(f)) for f in entry.member):
            raise UsageError(
                f"{request.did}: entry {name} of {request.path} draws random numbers at every call (dropout"
                " that is"
                " on), so its programs cannot be revised for other members: build the artifact again"
            )
    with stages.stage("read"):
        files = _weights_of(reader)
        slots = request.slots_of(
            old,
            lambda p: open_new_member(
                reader,
                files,
                p.path,
                replace(request.how, key=p.key, part=p.part),
                base=request.base,
                turned=lambda: of_programs(reader.program(f) for e in old.entries.values() for f in e.member),
            ),
        )
        modules = _modules(request, slots, list(old.entries))
    with stages.stage("check"):
        # A damaged file must not get a new hash.
        others = [name for name in (old.probe, old.factored.corrections) if name]
        reader.check_hashes([*(p.name for p in reader.weights_files()), *others])
        files.check(old.weights, len(old.members))
        table = new_table(old, files, slots)
    probed = weight_files.Weights([reader.path(old.probe)]) if old.probe else None
    entries = [RevisedEntry(name, row, reader, table, slots, probed) for name, row in old.entries.items()]
    return CheckedRevision(slots, modules, table, entries)


def _weights_of(reader: Reader) -> weight_files.Weights:
    """Opens the weights of an artifact."""
    factored = reader.manifest.factored
    corrections = reader.path(factored.corrections) if factored.corrections else None
    return weight_files.Weights(reader.weights_files(), factored, corrections)


def _proved(
    checked: CheckedRevision, wides: Mapping[str, list[LoweredProgram]], context: ProofContext
) -> list[ProvedRevision]:
    """Verifies all entries. Raises: VerificationError."""
    with warnings.catch_warnings():
        # Warnings of members at trial sizes do not concern the user.
        warnings.simplefilter("ignore")
        return [entry.prove(wides[entry.name], context) for entry in checked.entries]


def _proved_with(
    checked: CheckedRevision,
    wides: Mapping[str, list[LoweredProgram]],
    context: ProofContext,
    modules: Modules,
) -> list[ProvedRevision]:
    """Verifies all entries with other modules of new members. Raises: VerificationError."""
    return _proved(checked, wides, replace(context, modules=modules))


def _exported(
    reader: Reader,
    checked: CheckedRevision,
    proved: Sequence[ProvedRevision],
    writer: Writer,
    stages: Stages,
) -> form.Manifest:
    """Writes the programs and the probe, and returns the new manifest without its history."""
    old = reader.manifest
    with stages.stage("export"):
        entries = {p.name: p.write(writer, reader) for p in proved}
        calls = {place: answers for p in proved for place, answers in p.probe.items()}
        probe_name = write_tensors(writer, "probe", probe.make(calls)) if old.probe else ""
        _keep_costs(reader, checked, entries, writer)
        state_dicts = _state_dicts(reader, checked, writer)
    return replace(
        old,
        state_dicts=state_dicts,
        members=tuple(old.members[s.old] if s.old is not None else _member_row(s) for s in checked.slots),
        weights=checked.table.weights,
        entries=entries,
        probe=probe_name,
        verification=join_records(_records(proved)),
    )


def _state_dicts(reader: Reader, checked: CheckedRevision, writer: Writer) -> StateDicts:
    """Writes the extra states of the revised members, and returns the record of the manifest."""
    record, file = reader.manifest.state_dicts, extra_file(reader)
    new = [s.new.checkpoint.extra_state() if s.new is not None else None for s in checked.slots]
    extra = [
        extra_of_member(reader, file, slot.old)
        if slot.old is not None
        else stored_extra(own or {}, record.ignored)
        for slot, own in zip(checked.slots, new)
    ]
    for slot, state in zip(checked.slots, extra):
        refuse_code(state, f"member {slot.name}")
    return MemberStates(record, extra).write(writer)


def _keep_costs(
    reader: Reader, checked: CheckedRevision, entries: Mapping[str, Entry], writer: Writer
) -> None:
    """Keeps the costs of the artifact, which hold for any number of members. New kinds have other costs."""
    old = reader.manifest
    name = costs_file(old.files)
    if not name:
        return
    same = all(entries[n].member == e.member for n, e in old.entries.items()) and not checked.table.changed
    if same:
        writer.take(reader, [name])
    else:
        write_revised_costs(writer, [e.entry for e in checked.entries], stored_costs(reader))


def _with_history(
    manifest: form.Manifest, history: Mapping[str, Any], shard_bytes: int | None
) -> form.Manifest:
    """Returns the manifest with one more row in the history of its provenance."""
    before = manifest.provenance.get("history")
    provenance = {
        **manifest.provenance,
        **({} if shard_bytes is None else {SHARD_SIZE: shard_bytes}),
        "history": [*(before if isinstance(before, list) else []), dict(history)],
    }
    return replace(manifest, provenance=provenance)


def _history(
    request: ReviseRequest, old: form.Manifest, checked: CheckedRevision, proved: Sequence[ProvedRevision]
) -> dict[str, Any]:
    """Returns the revision's row in the history of the artifact's provenance."""
    compared = any(p.modules_compared for p in proved)
    return {
        "did": request.did,
        "members": _changed(old, checked.slots),
        "kinds": [k.to_json() for k in checked.table.changed],
        "from": old.digest,
        "command": command_line(),
        "date": timestamp(),
        "widepack": __version__,
        "torch": torch.__version__,
        "asked": [checked.slots[i].name for i in sorted(checked.modules)] if compared else [],
    }


def _report(
    request: ReviseRequest,
    manifest: form.Manifest,
    history: Mapping[str, Any],
    checked: CheckedRevision,
    proved: Sequence[ProvedRevision],
    left_out: list[str],
    way: str,
    stages: Stages,
) -> ReviseReport:
    table = checked.table
    return ReviseReport(
        path=os.fspath(request.target),
        did=request.did,
        members=tuple(s.name for s in checked.slots),
        changed=history["members"],
        kinds=history["kinds"],
        lowered=[p.name for p in proved if p.wides],
        left_out=left_out,
        written=way,
        asked=history["asked"],
        weights={k: sum(w.bytes(table.count) for w in table.weights if w.kind == k) for k in KINDS},
        bytes_disk=sum(f.bytes for f in manifest.files.values()),
        seconds=stages.seconds,
        before=history["from"],
        digest=manifest.digest,
        verification=manifest.verification,
        not_finite=not_finite(_records(proved)),
        unused=unused_names(
            [s.new.checkpoint for s in checked.slots if s.new is not None],
            (*manifest.state_dicts.ignored, *request.how.ignore),
        ),
    )


def _records(proved: Sequence[ProvedRevision]) -> dict[str, dict[str, Any]]:
    """Returns the records of the comparisons by entry."""
    return {p.name: p.record for p in proved}


def _strategies_of(manifest: form.Manifest) -> StrategyRequest:
    """Returns the strategies that the artifact was built with, as far as this version knows them."""
    names = manifest.provenance.get("strategy")
    known = strategy_names()
    return StrategyRequest.parse(
        [name for name in names if isinstance(name, str) and name in known]
        if isinstance(names, list)
        else "auto"
    )


def _modules(
    request: ReviseRequest, slots: Sequence[MemberSlot], entries: Sequence[str]
) -> dict[int, Callable[[], nn.Module]]:
    """Returns what makes the new members' own modules, by the number of the member.

    It is the factory that the user names, or the torch.export program that is the checkpoint. Raises:
    UsageError.
    """
    found: dict[int, Callable[[], nn.Module]] = {}
    for i, slot in enumerate(slots):
        if slot.new is None:
            continue
        factory = request.how.factory(slot.new.checkpoint.path)
        if factory is not None:
            factory.dtype = slot.new.dtype
        elif slot.new.checkpoint.program is not None and entries == [FORWARD]:
            factory = ExportedProgramFactory()
        if factory is not None:
            found[i] = partial(_filled, factory, slot.new, slot.name)
    return found


def _filled(factory: Factory, new: NewMember, name: str) -> nn.Module:
    """Returns a new member's own module with its weights. Raises: MemberMismatch."""
    return filled(factory, new.aligned.checkpoints[0], name)


def _member_row(slot: MemberSlot) -> Member:
    """Returns the manifest's row of a new member."""
    assert slot.new is not None
    checkpoint = slot.new.checkpoint
    return Member(slot.name, checkpoint.label, checkpoint.sha256(), checkpoint.bytes)


def _changed(old: form.Manifest, slots: Sequence[MemberSlot]) -> list[dict[str, Any]]:
    """Returns a row for each member that was removed, replaced or added."""
    names = {s.name for s in slots}
    removed: list[dict[str, Any]] = [
        {"member": m.name, "left": m.source} for m in old.members if m.name not in names
    ]
    sources = {m.name: m.source for m in old.members}
    rows = [_member_row(s) for s in slots if s.new is not None]
    return removed + [
        {
            "member": m.name,
            "source": m.source,
            "sha256": m.sha256,
            **({"left": sources[m.name]} if m.name in sources else {}),
        }
        for m in rows
    ]
