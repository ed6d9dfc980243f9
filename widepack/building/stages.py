"""Runs the stages of a build, one function for each: read, capture, lower, write, verify, export, publish.

Nothing is published before both comparisons of every program have passed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from typing import Any

from torch import nn

from widepack_artifacts import manifest as form
from widepack_artifacts.factored import Factored
from widepack_artifacts.writer import Writer

from ..capture.reachable import tensors_of
from ..checkpoints.discovery import LeftOut
from ..errors import CaptureError, UsageError, WidepackError
from ..fleet.base_record import BASE, FleetBase
from ..inference.unpublished import check_opens
from ..ir.random_ops import uses_random_ops
from ..ir.tensor_type import parse_slot
from ..lowering.wide_programs import LoweredProgram, make_wide_programs
from ..spec.entries import method_of
from ..spec.member_parts import parts_in
from ..spec.state import StateRequest, under
from ..system.autocast import plain_modes
from ..system.memory import returned_at_once
from ..system.progress import Stages
from ..system.readahead import read_headers
from ..tuning.quick_race import race_plans, race_seconds
from ..tuning.tune import tune
from ..verification import probe
from ..verification.record import join_records
from ..verification.reference import not_finite
from .captures import Captures, capture_members
from .costs_file import write_build_costs
from .entry import BuildEntry
from .members import EntryMembers, filled_member
from .prove import ProvedEntry, prove
from .provenance import PART_COUNTS, SHARD_SIZE, provenance_of
from .read import ReadMembers, read_members
from .report import BuildReport, build_report
from .request import BuildRequest
from .state_dicts import MemberStates
from .weights_table import WeightsTable
from .write import WeightFiles, write_factored, write_programs, write_tensors, write_weights


@dataclass(frozen=True)
class LoweredBuild:
    """A build before its verification.

    wides: the wide programs by entry. parts: the parts of the members that have programs of their own.
    states: what the members' state dicts have beside tensors. base: of a fleet, if the request names it.
    """

    table: WeightsTable
    entries: list[BuildEntry]
    wides: dict[str, list[LoweredProgram]]
    left_out: list[LeftOut]
    parts: list[range]
    states: MemberStates
    base: FleetBase | None = None


@plain_modes()
def run_build(request: BuildRequest) -> BuildReport:
    """Runs all stages of a build, then races or tunes the plans."""
    stages = Stages(request.progress)
    with returned_at_once(), _writer(request) as writer:
        lowered = _lowered(request, writer, stages)
        report = build_report(
            lowered.table, lowered.entries, lowered.wides, str(request.out), lowered.left_out, request.ignore
        )
        if writer is None:
            return replace(report, seconds=stages.seconds)
        proved, factored = _verified(request, lowered, writer, stages)
        manifest = _published(request, lowered, proved, factored, writer, stages)
        report = _final_report(request, lowered, proved, manifest)
    # The artifact is published and complete, so a failure of the tuning does not damage it.
    if request.tune_batches is not None:
        with stages.stage("tune"):
            tuned = tune(request.out, write=True, progress=request.progress, batches=request.tune_batches)
        report = replace(report, digest=tuned.digest, tuned=tuned.to_json())
    elif request.races and (seconds := race_seconds()) > 0:
        with stages.stage("race"):
            report = _raced(request, report, seconds)
    return replace(report, seconds=stages.seconds)


def _raced(request: BuildRequest, report: BuildReport, seconds: float) -> BuildReport:
    """Races the plans of a published artifact. Without a result the plans by rules of thumb stay."""
    try:
        raced = race_plans(request.out, seconds=seconds, progress=request.progress)
    except WidepackError as e:
        return replace(report, raced={"failed": str(e)})
    return replace(report, digest=raced.digest, raced=raced.to_json())


def _writer(request: BuildRequest) -> contextlib.AbstractContextManager[Writer | None]:
    """Returns the writer of the artifact; a dry run has none."""
    return contextlib.nullcontext() if request.dry_run else Writer(request.out, force=request.force)


def _lowered(request: BuildRequest, writer: Writer | None, stages: Stages) -> LoweredBuild:
    """Runs the stages from the checkpoints to the wide programs, and reserves disk space for the weights."""
    with stages.stage("read"):
        members = read_members(request)
    with stages.stage("capture"):
        captured, parameters = _captured(request, members)
    given = members.factory, members.aligned, list(captured.values()), parameters
    if members.fleet is None:
        table = WeightsTable(*given)
    else:
        with stages.stage("factor"):
            table = WeightsTable(*given, members.fleet, stages.step)
    entries = [BuildEntry(name, table, c, request.dropout) for name, c in captured.items()]
    if writer is not None:
        writer.reserve(sum(r.weight.bytes(table.count) for r in table.rows))
    with stages.stage("lower"):
        parts = parts_in([r.weight for r in table.rows], table.count, request.part_counts)
        wides = {e.entry: make_wide_programs(e, request.strategies, request.targets, parts) for e in entries}
    return LoweredBuild(table, entries, wides, members.left_out, parts, members.states, members.base)


def _captured(request: BuildRequest, members: ReadMembers) -> tuple[dict[str, Captures], list[str]]:
    """Captures all entries. Returns: the captures by entry, and the names of the parameters."""
    factory, aligned = members.factory, members.aligned
    first = filled_member(factory, aligned, 0)
    for name in request.entries:
        method_of(first, name)
    captured = {}
    try:
        for name in request.entries:
            states = request.states_of(name)
            one = EntryMembers(factory, aligned, name, request.entries, states, request.dropout)
            captured[name] = capture_members(request.calls, one)
    except CaptureError as e:
        if request.dtype is None:
            raise
        dtype = str(request.dtype).removeprefix("torch.")
        raise CaptureError(
            f"{e}. The members were converted to {dtype}, but inputs are not converted:"
            " describe them in the dtype that the converted model takes"
        ) from e
    _check_states(first, request.states, captured)
    if request.dropout and not any(uses_random_ops(c.first.program) for c in captured.values()):
        raise UsageError(
            f"dropout is on, but the program of {type(first).__name__} draws no random numbers: it has no"
            " dropout, or only dropout of probability 0; draws of Python and NumPy are not captured"
        )
    return captured, [n for n, _ in first.named_parameters(remove_duplicate=False)]


def _verified(
    request: BuildRequest, lowered: LoweredBuild, writer: Writer, stages: Stages
) -> tuple[list[ProvedEntry], Factored]:
    """Writes the weights, and verifies every entry with them.

    Returns: the entries, the weights files, and what the manifest says of weights that are stored as factors.
    Raises: VerificationError.
    """
    with stages.stage("write weights"):
        files = write_weights(writer, lowered.table, request.shard_bytes, stages.step)
        rows, count = lowered.table.factored, lowered.table.count
        factored = write_factored(writer, [r.weight for r in rows], (r.corrections(count) for r in rows))
    read_headers([writer.place(name) for name in files])
    written = WeightFiles.open(writer, files, factored)
    plain = replace(request.strategies, plain=True)
    with stages.stage("verify"):
        proved = [
            prove(
                entry,
                lowered.wides[entry.entry],
                partial(make_wide_programs, entry, plain, request.targets, lowered.parts),
                written,
                stages,
                request.tolerance,
            )
            for entry in lowered.entries
        ]
    return proved, factored


def _published(
    request: BuildRequest,
    lowered: LoweredBuild,
    proved: Sequence[ProvedEntry],
    factored: Factored,
    writer: Writer,
    stages: Stages,
) -> form.Manifest:
    """Writes the programs and the probe, and publishes the artifact."""
    wides = {p.entry.entry: p.wides for p in proved}
    with stages.stage("export"):
        pt2 = request.pt2 and not request.dropout
        manifest = write_programs(writer, [p.entry for p in proved], wides, pt2)
        entries = {p.entry.entry: replace(manifest.entries[p.entry.entry], rows=p.rows) for p in proved}
        calls = {place: answers for p in proved for place, answers in p.probe.items()}
        probe_name = write_tensors(writer, "probe", probe.make(calls))
        state_dicts = lowered.states.write(writer)
        name = lowered.table.factory.name
        write_build_costs(writer, [p.entry for p in proved], name)
    with stages.stage("publish"):
        provenance = {
            **provenance_of(lowered.table.factory, request.strategies, stages.seconds),
            "left_out": [b._asdict() for b in lowered.left_out],
            **({} if lowered.base is None else {BASE: lowered.base.to_json()}),
            SHARD_SIZE: request.shard_bytes,
            **({PART_COUNTS: list(request.part_counts)} if request.part_counts else {}),
        }
        verification = join_records(_records(proved))
        manifest = replace(
            manifest,
            factored=factored,
            state_dicts=state_dicts,
            entries=entries,
            probe=probe_name,
            verification=verification,
            provenance=provenance,
        )
        check_opens(writer, manifest)
        return writer.publish(manifest)


def _records(proved: Sequence[ProvedEntry]) -> dict[str, dict[str, Any]]:
    """Returns the records of the comparisons by entry."""
    return {p.entry.entry: p.record for p in proved}


def _final_report(
    request: BuildRequest,
    lowered: LoweredBuild,
    proved: Sequence[ProvedEntry],
    manifest: form.Manifest,
) -> BuildReport:
    """Returns the report of a published artifact.

    Verification may have replaced programs and corrected dims.
    """
    wides = {p.entry.entry: p.wides for p in proved}
    report = build_report(
        lowered.table, [p.entry for p in proved], wides, str(request.out), lowered.left_out, request.ignore
    )
    entries = {
        p.entry.entry: replace(
            report.entries[p.entry.entry], kernels_member=p.kernels.member, kernels_wide=p.kernels.wide
        )
        for p in proved
    }
    first = entries[request.entries[0]]
    return replace(
        report,
        verification=join_records(_records(proved)),
        bytes_disk=sum(f.bytes for f in manifest.files.values()),
        digest=manifest.digest,
        kernels_member=first.kernels_member,
        kernels_wide=first.kernels_wide,
        entries=entries,
        not_finite=not_finite(_records(proved)),
    )


def _check_states(
    module: nn.Module, states: Sequence[StateRequest], captured: Mapping[str, Captures]
) -> None:
    """Refuses states that no entry has or changes, and states whose type differs between entries.

    Raises: UsageError; CaptureError.
    """
    buffers = [n for n, b in module.named_buffers(remove_duplicate=False) if b is not None]
    inputs = [leaf.name for c in captured.values() for leaf in c.first.inputs if leaf.name not in buffers]
    for state in states:
        entries = [e for e in captured if state.entry in ("", e)]
        if state.name in buffers:
            if all(state.name in captured[e].first.unchanged for e in entries):
                raise UsageError(
                    f"state {state.name}: {', '.join(entries)} does not change this buffer in eval mode, so"
                    " it is an"
                    f" ordinary weight; leave --state {state.name} out"
                )
        elif not any(under(state.name, name) for name in inputs):
            raise _unknown_state(module, state, entries, buffers, inputs)
    types: dict[str, tuple[str, str]] = {}
    for entry, c in captured.items():
        for s in c.first.states:
            type_ = c.first.inputs[s.input].type
            other, first_type = types.setdefault(s.name, (entry, type_))
            if parse_slot(first_type) != parse_slot(type_):
                raise CaptureError(
                    f"state {s.name} is {first_type} in {other} and {type_} in {entry}; all entries carry the"
                    " same"
                    " state, so give their inputs one type"
                )


def _unknown_state(
    module: nn.Module,
    state: StateRequest,
    entries: Sequence[str],
    buffers: Sequence[str],
    inputs: Sequence[str],
) -> UsageError:
    """Returns the error for a state that is neither a buffer nor an input."""
    kind = type(module).__name__
    if state.name in dict(tensors_of(module)):
        return UsageError(
            f"state {state.name} is a plain attribute of {kind}, which an export does not carry; make it a"
            " buffer:"
            f' self.register_buffer("{state.name.rpartition(".")[2]}", ...)'
        )
    near = get_close_matches(state.name, [*buffers, *inputs], n=1)
    guess = f", did you mean {near[0]}?" if near else ";"
    return UsageError(
        f"state {state.name}: {kind} has no buffer and {', '.join(entries)} no input of this name{guess}"
        f" buffers: {', '.join(buffers[:20]) or 'none'}; inputs: {', '.join(dict.fromkeys(inputs)) or 'none'}"
    )
