"""Runs the stages of a build: read, capture, lower, write, verify, export, publish.

Nothing is published before both comparisons of every program have passed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import nn

from widepack_artifacts import manifest as form
from widepack_artifacts.errors import some
from widepack_artifacts.writer import Writer

from ..capture.reachable import tensors_of
from ..checkpoints.unused_names import unused_names
from ..errors import CaptureError, UsageError, WidepackError
from ..fleet.adapter_members import BASE
from ..inference.feature_record import FEATURES
from ..inference.load import check_opens
from ..ir.random_ops import uses_random_ops
from ..ir.tensor_type import parse_slot
from ..lowering.wide_programs import LoweredProgram, make_wide_programs
from ..planning.request import StrategyRequest
from ..spec.entries import method_of
from ..spec.member_parts import parts_in
from ..spec.state import StateRequest, under
from ..system.autocast import plain_modes
from ..system.memory import returned_at_once
from ..system.progress import Stages
from ..system.readahead import read_headers
from ..tuning.tune import measure_new, tune
from ..verification import probe
from ..verification.record import join_records
from ..verification.reference import not_finite
from .build_weights import BuildEntry, BuildWeights
from .captures import Captures, EntryMembers, capture_members, filled_member
from .costs import facts_of, write_costs
from .features import features_of
from .hyper_parameters import contradicted
from .prove import ProvedEntry, prove
from .read import read_members
from .report import OF_FIRST, BuildReport, entry_report, fleet_report
from .request import BuildRequest
from .write import (
    PART_COUNTS,
    SHARD_SIZE,
    WeightFiles,
    provenance_of,
    write_factored,
    write_programs,
    write_tensors,
    write_weights,
)


@plain_modes()
def run_build(request: BuildRequest) -> BuildReport:
    """Runs all stages of a build, then measures or tunes the plans."""
    stages = Stages(request.progress)
    writing: AbstractContextManager[Writer | None] = nullcontext()  # of a dry run
    if not request.dry_run:
        writing = Writer(request.out, force=request.force)
    with returned_at_once(), writing as writer:
        build = Build(request, stages, writer)
        if writer is None:
            return build.report(build.entries, build.wides, seconds=stages.seconds)
        report = build.publish(writer)
    # The artifact is published and complete, so a failure of the tuning does not damage it.
    if request.tune_batches is not None:
        with stages.stage("tune"):
            tuned = tune(request.out, write=True, progress=request.progress, batches=request.tune_batches)
        report = replace(report, digest=tuned.digest, tuned=tuned.to_json())
    elif request.measures:
        with stages.stage("measure"):
            report = _measured(request, report)
    return replace(report, seconds=stages.seconds)


def _measured(request: BuildRequest, report: BuildReport) -> BuildReport:
    """Measures the plans of a published artifact. Without a result the predicted plans stay."""
    try:
        found = measure_new(request.out, seconds=request.budget, progress=request.progress)
    except WidepackError as e:
        return replace(report, measured={"failed": str(e)})
    return replace(report, digest=found.digest, measured=found.to_json())


class Build:
    """One build, while it runs.

    members: as they were read. table: their weights. entries: before the verification. parts: the parts of
    the members that have programs of their own. wides: the wide programs by entry. contradicted: as the
    report has it.
    """

    def __init__(self, request: BuildRequest, stages: Stages, writer: Writer | None) -> None:
        """Runs the stages from the checkpoints to the wide programs, and reserves disk space."""
        self.request, self.stages = request, stages
        with stages.stage("read"):
            self.members = members = read_members(request)
        self.contradicted: dict[str, dict[str, Any]] = {}
        with stages.stage("capture"):
            captured, parameters = self._captured()
        given = members.factory, members.aligned, list(captured.values()), parameters
        if members.fleet is None:
            self.table = BuildWeights(*given)
        else:
            with stages.stage("factor"):
                self.table = BuildWeights(*given, members.fleet, stages.step)
        self.entries = [BuildEntry(name, self.table, c, request.dropout) for name, c in captured.items()]
        inputs = {s.name: s.type for entry in self.entries for s in entry.sources}
        self.features = features_of(request.features, inputs)
        if writer is not None:
            writer.reserve(sum(self.table.bytes_by_kind.values()))
        with stages.stage("lower"):
            self.parts = parts_in(self.table.weights, self.table.count, request.part_counts)
            self.wides = {e.entry: self._lowered(e, request.strategies) for e in self.entries}

    def _captured(self) -> tuple[dict[str, Captures], list[str]]:
        """Captures all entries. Returns: the captures by entry, and the names of the parameters."""
        request, factory, aligned = self.request, self.members.factory, self.members.aligned
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
        for captures in captured.values():
            self.contradicted.update(contradicted(factory, aligned, captures))
        _check_states(first, request.states, captured)
        if request.dropout and not any(uses_random_ops(c.first.program) for c in captured.values()):
            raise UsageError(
                f"dropout is on, but the program of {type(first).__name__} draws no random numbers: it has no"
                " dropout, or only dropout of probability 0; draws of Python and NumPy are not captured"
            )
        return captured, [n for n, _ in first.named_parameters(remove_duplicate=False)]

    def _lowered(self, entry: BuildEntry, strategies: StrategyRequest) -> list[LoweredProgram]:
        return make_wide_programs(entry, strategies, self.request.targets, self.parts)

    def publish(self, writer: Writer) -> BuildReport:
        """Writes the weights, verifies every entry with them, and publishes the artifact.

        Raises: VerificationError.
        """
        request, table, stages = self.request, self.table, self.stages
        with stages.stage("write weights"):
            files = write_weights(writer, table, request.shard_bytes, stages.step)
            factored = write_factored(writer, table.stored_factors)
        read_headers([writer.place(name) for name in files])
        written = WeightFiles.open(writer, files, factored)
        plain = replace(request.strategies, plain=True)
        with stages.stage("verify"):
            proved = [
                prove(
                    entry,
                    self.wides[entry.entry],
                    partial(self._lowered, entry, plain),
                    written,
                    stages,
                    request.tolerance,
                )
                for entry in self.entries
            ]
        with stages.stage("export"):
            manifest = replace(self._exported(proved, writer), factored=factored)
        with stages.stage("publish"):
            manifest = replace(manifest, provenance=self._provenance())
            check_opens(writer, manifest)
            manifest = writer.publish(manifest)
        # Verification may have replaced programs and corrected dims.
        return self.report(
            [p.entry for p in proved],
            {p.name: p.wides for p in proved},
            {p.name: p.kernels for p in proved},
            verification=manifest.verification,
            bytes_disk=sum(f.bytes for f in manifest.files.values()),
            digest=manifest.digest,
            not_finite=not_finite({p.name: p.record for p in proved}),
        )

    def _exported(self, proved: Sequence[ProvedEntry], writer: Writer) -> form.Manifest:
        """Writes the programs, the probe and the costs, and returns the manifest without its provenance."""
        pt2, name = self.request.pt2 and not self.request.dropout, self.table.factory.name
        manifest = write_programs(writer, [p.entry for p in proved], {p.name: p.wides for p in proved}, pt2)
        calls = {place: answers for p in proved for place, answers in p.probe.items()}
        firsts = [(p.entry, p.entry.captured) for p in proved]
        tensors = probe.make(calls)
        probe_name = write_tensors(writer, "probe", tensors)
        state_dicts = self.members.states.write(writer)
        write_costs(
            writer,
            [(e.entry, e, facts_of(first, first.classes.get("", "") or name)) for e, first in firsts],
        )
        return replace(
            manifest,
            state_dicts=state_dicts,
            entries={p.name: replace(manifest.entries[p.name], rows=p.rows) for p in proved},
            probe=probe_name,
            verification=join_records({p.name: probe.fitted(p.name, p.record, tensors) for p in proved}),
        )

    def _provenance(self) -> dict[str, Any]:
        request, base = self.request, self.members.base
        return {
            **provenance_of(self.table.factory, request.strategies, self.stages.seconds),
            "left_out": [b._asdict() for b in self.members.left_out],
            **({} if base is None else {BASE: base.to_json()}),
            SHARD_SIZE: request.shard_bytes,
            **({FEATURES: {n: list(w) for n, w in self.features.items()}} if self.features else {}),
            **({PART_COUNTS: list(request.part_counts)} if request.part_counts else {}),
        }

    def report(
        self,
        entries: Sequence[BuildEntry],
        wides: Mapping[str, Sequence[LoweredProgram]],
        kernels: Mapping[str, tuple[int, int]] = MappingProxyType({}),
        **more: Any,
    ) -> BuildReport:
        """Returns the report. kernels: of a member, and of the wide program, by entry; empty after a dry run.

        more: the fields that are known after verification.
        """
        table, members = self.table, self.members
        reports = {e.entry: entry_report(e, wides[e.entry], kernels.get(e.entry, (0, 0))) for e in entries}
        weights = table.bytes_by_kind
        size, first = sum(weights.values()), next(iter(reports.values()))
        known = {name: getattr(first, name) for name in OF_FIRST}
        known |= {"seconds": {}, "verification": {}, "bytes_disk": size, "bytes_memory": size, **more}
        return BuildReport(
            path=str(self.request.out),
            members=tuple(table.aligned.names),
            weights=weights,
            left_out=[b._asdict() for b in members.left_out],
            entries=reports,
            fleet=fleet_report(table),
            contradicted=self.contradicted,
            unused=unused_names(table.aligned.checkpoints, self.request.ignore),
            **known,
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
                    f" it is an ordinary weight; leave --state {state.name} out"
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
                    " same state, so give their inputs one type"
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
        f" buffers: {some(buffers, 20) or 'none'}; inputs: {', '.join(dict.fromkeys(inputs)) or 'none'}"
    )
