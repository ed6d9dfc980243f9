"""`widepack.build`: checkpoints -> artifact. (A module of the function's own name would take its place in the package.)

Stages: read, align, capture, lower, write weights, verify, export, publish. Nothing is published before both comparisons have passed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from widepack_artifacts import weights as weight_files
from widepack_artifacts.writer import Writer

from ..verification import probe
from ..system.readahead import read_headers
from ..checkpoints.discovery import LeftOut, listed, member_names
from ..spec.dropout import is_on, passes
from ..spec.entries import FORWARD, entry_names, method_of
from ..errors import CaptureError, UsageError
from .entry import Captures, Job, Specs, Table, capture_members, fresh_member, specs_of
from ..ir.kinds import kinds
from ..checkpoints.alignment import read_names, repeated
from ..system.memory import returned_at_once
from .factories import find_dtype
from ..capture.module_tensors import tensors_of
from ..system.progress import Report, Stages
from .prove import prove
from .read import read_members
from ..registry.registry import Choice
from ..ir.at_rest import draws
from ..spec.input_spec import parse_size, parse_type
from ..spec.state import Asked, parse_states, under
from ..verification.reference import not_finite
from ..tuning.tune import BATCHES
from ..tuning.tune import tune as measured
from ..inference.model import RESERVED
from ..lowering.wide_programs import Wide, make_wides, wide_share
from .write import SHARD_BYTES, SHARD_SIZE, provenance_of, write_programs, write_tensors, write_weights

TARGETS = ("cpu", "cuda")


@dataclass(frozen=True)
class EntryReport:
    """What a build made of one entry.

    wide_share: of the nodes that read a Stacked weight, the part that runs in a strategy other than sequential and loop. kernels_member, kernels_wide: of one
    call at batch 2, the weight prologue aside. kinds: nodes by kind. strategies: nodes by strategy, pattern `shared` on the CPU at the smallest batch class.
    """

    wide_share: float
    kernels_member: int
    kernels_wide: int
    kinds: dict[str, int]
    strategies: dict[str, int]
    plans: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class BuildReport:
    """What a build made, and how well.

    wide_share, kernels_member, kernels_wide, kinds, strategies, plans: of the first entry, as EntryReport has them; entries: of each.
    seconds: by stage. weights: bytes by kind. left_out: the checkpoints that are no members, with `skip_bad`: number among those given, path, and why.
    not_finite: members whose own answers have NaN or inf in an output in which all others' are finite: `entry`, `member`, `output`, `numbers`, `of`. tuned: what `tune` measured, as TuneReport.to_json gives it; None without it.
    """

    path: str
    members: tuple[str, ...]
    wide_share: float
    kernels_member: int
    kernels_wide: int
    kinds: dict[str, int]
    strategies: dict[str, int]
    seconds: dict[str, float]
    verification: dict[str, Any]
    weights: dict[str, int]
    bytes_disk: int
    bytes_memory: int
    plans: list[dict[str, Any]] = field(default_factory=list)
    digest: str = ""
    left_out: list[dict[str, Any]] = field(default_factory=list)
    entries: dict[str, EntryReport] = field(default_factory=dict)
    tuned: dict[str, Any] | None = None
    not_finite: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def build(
    checkpoints: Sequence[str | Path],
    out: str | Path,
    *,
    model: str | Callable[..., nn.Module] | None = None,
    model_args: Mapping[str, Any] | None = None,
    inputs: Specs | None = None,
    sample: Sequence[Any] | Mapping[str, Any] | None = None,
    sample_kwargs: Mapping[str, Any] | None = None,
    dynamic: Mapping[str, Any] | None = None,
    entries: Sequence[str] | None = None,
    state: Sequence[str] = (),
    names: str | Path | Sequence[str] | None = None,
    key: str | None = None,
    dtype: str | torch.dtype | None = None,
    trust_pickle: bool = False,
    skip_bad: bool = False,
    strategy: str | Sequence[str] = "auto",
    targets: Sequence[str] = TARGETS,
    share: str = "auto",
    pt2: bool = True,
    max_shard_size: int | str = SHARD_BYTES,
    force: bool = False,
    dry_run: bool = False,
    tune: bool | Sequence[int] = False,
    n: int | None = None,
    dropout: str = "off",
    progress: Report | None = None,
) -> BuildReport:
    """Fuse N checkpoints of one architecture into an artifact, and prove it right.

    checkpoints: N files of torch.save, safetensors or torch.export, indexes of shards, or folders of one. out: the folder to make. model:
    `"pkg.mod:factory"`, `"file.py:factory"`, `"hf"` (transformers, by the config.json beside the first checkpoint) or a callable; it may take `state_dict=` so that
    heads of other sizes can be built. torch.export programs, and pickled modules, need none. inputs: specs such as `x=float32[B,3,32,32]`; or sample and sample_kwargs: one call's inputs, with
    dynamic {name: {axis: "B"}} (default: axis 0 is "B"; one letter that the example holds at two sizes is two dims). entries: methods of the module, each to become a
    program of its own over the same weights (default: forward); with several, a spec is `encode:x=float32[B,3]` or holds for all of them, and sample, sample_kwargs and
    dynamic are {entry: ...}. state: buffers that the member changes, and inputs whose new values are outputs (`cache`, `h=h_new`): the caller carries them, one a member.
    names: the members', as a list, a text `A,B`, or a file of one a line. key: where the state dict is in each file. dtype: what all floating weights are converted to.
    trust_pickle: run the code that pickled files name. skip_bad: build without the checkpoints that cannot be read or are of another model. strategy: auto, wide, loop, or
    strategies of ops. share: auto, or none: equal weights stay the members' own. pt2: torch.export programs too. max_shard_size: of a weights file, in bytes or as
    `"5GB"`; a weight is never divided. dry_run: everything but the artifact.
    tune: measure the plans on this machine when the artifact is there, and publish them in it (`widepack.tune`); or the batches to measure at.
    dropout: "on" keeps dropout on in eval mode, a draw a member and call; n: how many passes of the one checkpoint that is given then, whose weights are kept once. Such
    programs are proved, and probed at load, with their draws at rest; they run on `eager`, and are not tuned.
    progress: called with (stage, done, total).

    Raises: UsageError, CheckpointError, MemberMismatch, CaptureError, LoweringError, VerificationError, ArtifactError. Nothing is published then.
    """
    asked = Choice.parse(strategy)
    for target in targets:
        if target not in TARGETS:
            raise UsageError(f"unknown target {target!r}; known: {', '.join(TARGETS)}")
    if tune is not False and asked != Choice():
        raise UsageError("tune measures every strategy and takes the fastest, and strategy names one: give one of the two")
    paths = listed(checkpoints)
    drops = is_on(dropout)
    count = passes(n, drops, len(paths), tune is not False)
    given_names = read_names(names, count) if names is not None else member_names(paths) if n is None else tuple(map(str, range(count)))
    wanted = find_dtype(dtype)
    chosen = entry_names(entries, RESERVED)
    for name in chosen if inputs else ():
        specs_of(inputs or (), name, chosen)  # a typo is told before anything is read
    states = parse_states(state, chosen)
    most = parse_size(max_shard_size)
    stages = Stages(progress)
    with returned_at_once(), Writer(out, force=force) if not dry_run else _Nothing() as writer:
        with stages.stage("read"):
            factory, aligned, left_out = read_members(
                paths,
                given_names[: len(paths)],
                model,
                model_args,
                key=key,
                dtype=wanted,
                trust_pickle=trust_pickle,
                skip_bad=skip_bad,
                share=share,
                inputs=inputs.get(FORWARD) if isinstance(inputs, Mapping) else inputs,
            )
            if n is not None:
                aligned = repeated(aligned, given_names)
        with stages.stage("capture"):
            first = fresh_member(factory, aligned.checkpoints[0], aligned.state_dict(0))
            for name in chosen:
                method_of(first, name)
            try:
                captured = {
                    name: capture_members(
                        factory, aligned, inputs, sample, sample_kwargs, dynamic, name, chosen, [s for s in states if s.entry in ("", name)], drops
                    )
                    for name in chosen
                }
            except CaptureError as e:
                if wanted is None:
                    raise
                raise CaptureError(
                    f"{e}. The members were converted to {dtype}, inputs are not: describe them in the dtype that the model takes then"
                ) from e
            _check_states(first, states, captured)
            if drops and not any(draws(c.first.program) for c in captured.values()):
                raise UsageError(f"dropout is on, and {type(first).__name__} draws nothing in eval mode: it has no dropout, or one of probability 0")
        table = Table(factory, aligned, list(captured.values()), [n for n, _ in first.named_parameters(remove_duplicate=False)])
        del first  # a whole member's weights
        jobs = [Job(name, table, captured[name], drops) for name in chosen]
        if isinstance(writer, Writer):
            writer.reserve(sum(r.weight.bytes(table.count) for r in table.rows))
        with stages.stage("lower"):
            wides = {job.entry: make_wides(job, asked, targets) for job in jobs}
            report = _report(table, jobs, wides, str(out), stages, left_out)
        if dry_run:
            return replace(report, seconds=stages.seconds)
        assert isinstance(writer, Writer)
        with stages.stage("write weights"):
            files = write_weights(writer, table, most, stages.step)
        places = [writer.place(name) for name in files]
        read_headers(places)
        held = weight_files.Weights(places)
        with stages.stage("verify"):
            records: dict[str, dict[str, Any]] = {}
            probed: dict[str, probe.Answers] = {}
            made: dict[str, EntryReport] = {}
            for job in jobs:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # what a member warns of at the sizes that are tried is no news of this build
                    plain = partial(make_wides, job, replace(asked, plain=True), targets)
                    wides[job.entry], records[job.entry], answers, counts = prove(job, wides[job.entry], plain, held, places, stages)
                probed.update(answers)
                made[job.entry] = replace(_entry_report(job, wides[job.entry]), kernels_member=counts[0], kernels_wide=counts[1])
            verification = probe.joined(records)
            report = _report(table, jobs, wides, str(out), stages, left_out)  # the programs may be others than were tried first
        with stages.stage("export"):
            manifest = write_programs(writer, jobs, wides, pt2 and not drops)
            probe_name = write_tensors(writer, "probe", probe.make(probed))
        with stages.stage("publish"):
            provenance = provenance_of(factory, aligned.checkpoints, asked, stages) | {"left_out": report.left_out, SHARD_SIZE: most}
            manifest = replace(manifest, probe=probe_name, verification=verification, provenance=provenance)
            manifest = writer.publish(manifest)
        disk = sum(f.bytes for f in manifest.files.values())
        built = replace(
            report,
            seconds=stages.seconds,
            verification=verification,
            bytes_disk=disk,
            digest=manifest.digest,
            kernels_member=made[chosen[0]].kernels_member,
            kernels_wide=made[chosen[0]].kernels_wide,
            entries=made,
            not_finite=not_finite(records),
        )
    if tune is False:
        return built
    with stages.stage("tune"):  # the artifact is published and whole by now: a tuning that fails takes nothing from it
        tuned = measured(out, write=True, progress=progress, batches=BATCHES if tune is True else tuple(tune))
    return replace(built, digest=tuned.digest, tuned=tuned.to_json(), seconds=stages.seconds)


def _check_states(module: nn.Module, states: Sequence[Asked], captured: Mapping[str, Captures]) -> None:
    """Refuse states that no entry has or changes, and one that has another type in another entry. Raises: UsageError, CaptureError."""
    buffers = [n for n, b in module.named_buffers(remove_duplicate=False) if b is not None]
    inputs = [leaf.name for c in captured.values() for leaf in c.first.inputs if leaf.name not in buffers]
    for asked in states:
        here = [e for e in captured if asked.entry in ("", e)]
        if asked.name in buffers:
            if all(asked.name in captured[e].first.unchanged for e in here):
                raise UsageError(
                    f"state {asked.name}: {', '.join(here)} leaves this buffer as it is in eval mode; it is an ordinary weight: leave --state {asked.name} out"
                )
        elif not any(under(asked.name, name) for name in inputs):
            if asked.name in dict(tensors_of(module)):
                raise UsageError(
                    f"state {asked.name} is a plain attribute of {type(module).__name__}, which no export carries: make it a buffer, "
                    f'self.register_buffer("{asked.name.rpartition(".")[2]}", ...)'
                )
            near = get_close_matches(asked.name, [*buffers, *inputs], n=1)
            raise UsageError(
                f"state {asked.name}: {type(module).__name__} has no buffer and {', '.join(here)} no input of this name{f', did you mean {near[0]}?' if near else ';'} "
                f"buffers: {', '.join(buffers[:20]) or 'none'}; inputs: {', '.join(dict.fromkeys(inputs)) or 'none'}"
            )
    types: dict[str, tuple[str, str]] = {}
    for entry, c in captured.items():
        for s in c.first.states:
            type_ = c.first.inputs[s.input].type
            other, found = types.setdefault(s.name, (entry, type_))
            if parse_type(found) != parse_type(type_):
                raise CaptureError(
                    f"state {s.name} is {found} in {other} and {type_} in {entry}; entries carry one state: give their inputs one type"
                )


class _Nothing:
    """In a dry run, what stands for the writer."""

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *_: object) -> None:
        return None


def _entry_report(job: Job, wides: Sequence[Wide]) -> EntryReport:
    wide = next(w for w in wides if w.pattern == "shared")
    slots = job.slots("shared")
    program = job.simple("shared")[0]
    found = kinds(program, slots)
    strategies: dict[str, int] = {}
    for used in wide.lowered.used.values():
        strategies[used] = strategies.get(used, 0) + 1
    return EntryReport(
        wide_share=wide_share(program, found, wide.lowered.used),
        kernels_member=0,
        kernels_wide=0,
        kinds={k: sum(found[n.name] == k for n in program.nodes) for k in ("shared", "stacked", "ragged")},
        strategies=strategies,
        plans=[
            {
                "device": p.device,
                "pattern": p.pattern,
                "batch": list(p.batch),
                "strategies": p.strategies(),
                "because": p.regions[0].because if p.regions else "",
            }
            for w in wides
            for p in w.uses
        ],
    )


def _report(
    table: Table, jobs: Sequence[Job], wides: Mapping[str, Sequence[Wide]], out: str, stages: Stages, left_out: Sequence[LeftOut]
) -> BuildReport:
    """What is known before anything is verified."""
    entries = {job.entry: _entry_report(job, wides[job.entry]) for job in jobs}
    weights = {k: sum(r.weight.bytes(table.count) for r in table.rows if r.weight.kind == k) for k in ("shared", "stacked", "ragged")}
    first = next(iter(entries.values()))
    return BuildReport(
        path=out,
        members=tuple(table.aligned.names),
        wide_share=first.wide_share,
        kernels_member=0,
        kernels_wide=0,
        kinds=first.kinds,
        strategies=first.strategies,
        seconds=stages.seconds,
        verification={},
        weights=weights,
        bytes_disk=sum(weights.values()),
        bytes_memory=sum(weights.values()),
        plans=first.plans,
        left_out=[b._asdict() for b in left_out],
        entries=entries,
    )
