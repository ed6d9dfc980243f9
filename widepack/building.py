"""`widepack.build`: checkpoints -> artifact. (A module of the function's own name would take its place in the package.)

Stages: read, align, capture, lower, write weights, verify, export, publish. Nothing is published before both comparisons have passed.
"""

from __future__ import annotations

import datetime
import platform
import shlex
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from widepack_artifacts import manifest as form
from widepack_artifacts import strict_json, tree
from widepack_artifacts import weights as weight_files
from widepack_artifacts.store import Writer

from . import probe, small_sizes, verify
from .checkpoints import LeftOut, listed, member_names
from .codec import dtype_of
from .compare import Pool
from .counting import kernels
from .entries import FORWARD, entry_names, method_of
from .errors import CaptureError, UsageError, VerificationError
from .exported import export_program, placeholder
from .exported_programs import Programs
from .job import Captures, Job, Row, Specs, Table, all_weights, capture_members, filled_member, fresh_member, specs_of
from .kinds import kinds
from .members import Factory, read_names
from .models import find_dtype
from .own_tensors import tensors_of
from .progress import Report, Stages
from .reading import read_members
from .registry import Choice
from .replay import CPU
from .runtime import Executable
from .specs import parse_type
from .state import BUFFER, Asked, parse_states, under
from .trial import Trial, why_not
from .tuner import BATCHES
from .tuner import tune as measured
from .version import __version__
from .wide_model import RESERVED
from .wides import PATTERNS, Wide, make_wides, same_programs, wide_only, wide_share

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
    tuned: what `tune` measured, as TuneReport.to_json gives it; None without it.
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
    force: bool = False,
    dry_run: bool = False,
    tune: bool | Sequence[int] = False,
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
    strategies of ops. share: auto, or none: equal weights stay the members' own. pt2: torch.export programs too. dry_run: everything but the artifact.
    tune: measure the plans on this machine when the artifact is there, and publish them in it (`widepack.tune`); or the batches to measure at.
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
    given_names = read_names(names, len(paths)) if names is not None else member_names(paths)
    wanted = find_dtype(dtype)
    chosen = entry_names(entries, RESERVED)
    for name in chosen if inputs else ():
        specs_of(inputs or (), name, chosen)  # a typo is told before anything is read
    states = parse_states(state, chosen)
    stages = Stages(progress)
    with Writer(out, force=force) if not dry_run else _Nothing() as writer:
        with stages.stage("read"):
            factory, aligned, left_out = read_members(
                paths,
                given_names,
                model,
                model_args,
                key=key,
                dtype=wanted,
                trust_pickle=trust_pickle,
                skip_bad=skip_bad,
                share=share,
                inputs=inputs.get(FORWARD) if isinstance(inputs, Mapping) else inputs,
            )
        with stages.stage("capture"):
            first = fresh_member(factory, aligned.checkpoints[0], aligned.state_dict(0))
            for name in chosen:
                method_of(first, name)
            try:
                captured = {
                    name: capture_members(
                        factory, aligned, inputs, sample, sample_kwargs, dynamic, name, chosen, [s for s in states if s.entry in ("", name)]
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
        table = Table(factory, aligned, list(captured.values()), [n for n, _ in first.named_parameters(remove_duplicate=False)])
        jobs = [Job(name, table, captured[name]) for name in chosen]
        if isinstance(writer, Writer):
            writer.reserve(sum(r.weight.bytes(table.count) for r in table.rows))
        with stages.stage("lower"):
            wides = {job.entry: make_wides(job, asked, targets) for job in jobs}
            report = _report(table, jobs, wides, str(out), stages, left_out)
        if dry_run:
            return replace(report, seconds=stages.seconds)
        assert isinstance(writer, Writer)
        with stages.stage("write weights"):
            weights_name = _write_weights(writer, table)
        held = weight_files.Weights([writer.place(weights_name)])
        with stages.stage("verify"):
            records: dict[str, dict[str, Any]] = {}
            probed: dict[str, probe.Answers] = {}
            made: dict[str, EntryReport] = {}
            for job in jobs:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # what a member warns of at the sizes that are tried is no news of this build
                    plain = partial(make_wides, job, replace(asked, plain=True), targets)
                    wides[job.entry], records[job.entry], answers, counts = _verify(job, wides[job.entry], plain, held, stages)
                probed.update({f"{probe.prefix(job.entry)}{pattern}": found for pattern, found in answers.items()})
                made[job.entry] = replace(_entry_report(job, wides[job.entry]), kernels_member=counts[0], kernels_wide=counts[1])
            verification = probe.joined(records)
            report = _report(table, jobs, wides, str(out), stages, left_out)  # the programs may be others than were tried first
        with stages.stage("export"):
            manifest = _write_programs(writer, jobs, wides, pt2)
            probe_name = _write_tensors(writer, "probe", probe.make(probed))
        with stages.stage("publish"):
            provenance = _provenance(factory, aligned.checkpoints, asked, stages) | {"left_out": report.left_out}
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


def _write_weights(writer: Writer, table: Table) -> str:
    def parts(row: Row) -> Callable[[], Iterator[torch.Tensor]]:
        return lambda: (row.value(i) for i in range(table.count if row.weight.kind == "stacked" else 1))

    entries: list[tuple[str, Sequence[int], torch.dtype, Callable[[], Iterator[torch.Tensor]]]] = []
    for row in table.rows:
        w = row.weight
        if w.kind == "ragged":
            entries += [(f"{w.name}@{i}", w.shape[i], dtype_of(w.dtype), lambda r=row, i=i: iter([r.value(i)])) for i in range(table.count)]  # type: ignore[misc]
        else:
            entries.append((w.name, w.tensors(table.count)[w.name], dtype_of(w.dtype), parts(row)))
    with writer.stream("weights", "safetensors") as file:
        weight_files.write(file, entries, {"format": "pt"})
    return file.name


def _write_tensors(writer: Writer, stem: str, tensors: Mapping[str, torch.Tensor]) -> str:
    with writer.stream(stem, "safetensors") as file:
        weight_files.write(file, [(n, list(t.shape), t.dtype, lambda t=t: iter([t])) for n, t in tensors.items()])  # type: ignore[misc]
    return file.name


def _subject(job: Job, held: weight_files.Weights) -> verify.Subject:
    first = job.first

    def bind(leaves: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = list(first.signature)
        while given and given[-1].default and "const" in given[-1].tree:  # what was left out stays out: a wrapper may fill it in by name
            given.pop()
        built = [(n, k, tree.build(t, list(leaves), lambda name, rows: dict(rows))) for n, k, t, _ in given]
        return tuple(v for _, k, v in built if k == "positional"), {n: v for n, k, v in built if k == "keyword"}

    return verify.Subject(
        members=tuple(job.aligned.names),
        programs=job.programs,
        signatures=job.captures.signatures,
        sources=job.sources,
        outputs=[n for n, _ in first.outputs],
        sizes=first.sizes,
        batch=job.batch,
        weights=lambda i: job.weights_of(i, held),
        module=lambda i: filled_member(job.factory, job.aligned, i),
        method=job.entry,
        states=job.states,
        initial=lambda i, state: job.table.by_name[state.name].value(i) if state.how == BUFFER else None,
        bind=bind,
        numbers=tree.numbers(first.returned),
        alike=job.captures.alike(job.aligned.names),
        fits=_fits(job),
    )


def _fits(job: Job) -> Callable[[Mapping[str, int]], bool]:
    return verify.fitting(job.bounds, [g.expr for g in job.first.guards])


def _verify(
    job: Job, wides: list[Wide], plain: Callable[[], list[Wide]], held: weight_files.Weights, stages: Stages
) -> tuple[list[Wide], dict[str, Any], dict[str, probe.Answers], tuple[int, int]]:
    """Both comparisons of every program of an entry. plain: makes those without packed convolutions, which add up in another order than some networks bear.

    Returns: the programs that are right; the record, the probe's calls by pattern, and the kernels of a call. Raises: VerificationError.
    """
    one = cache(lambda: filled_member(job.factory, job.aligned, 0))
    subject = replace(_subject(job, held), module=lambda i: one())  # small sizes are asked of member 0 alone, many times
    _refuse_example(job, subject)
    if gone := small_sizes.needless(subject, job.bounds, [g.expr for g in job.first.guards]):
        job.first = replace(job.first, guards=tuple(g for i, g in enumerate(job.first.guards) if i not in gone))
    for letter in job.first.sizes:
        if why := small_sizes.way_at_one(replace(subject, fits=_fits(job)), letter):
            job.at_least_two(letter, why)
    subject = replace(_subject(job, held), made=subject.made)
    made = verify.calls(subject, PATTERNS)
    pools = [Pool(n) for n, _ in job.first.outputs]
    found, captured, raised = verify.answers(subject, made, pools, stages.step)
    if not raised:
        verify.widen(pools)

    def wide_records(some: Sequence[Wide]) -> dict[str, Any]:
        return _wide_records(job, subject, some, held, made, found, pools)

    try:
        records = wide_records(wides)
    except VerificationError:
        others = plain()
        if same_programs(others, wides):
            raise
        wides, records = others, wide_records(others)
    verification = {
        "calls": [f"{c.pattern} {c.label}" for c in made],
        "truth": "float64" if raised else "float32 (an op has no float64 kernel, or decides otherwise in it); bound 1e-5 of the scale",
        "nested_tensor_fast_path": "off",
        "capture": [p.record() for p in captured],
        "wide": records,
        "torch": torch.__version__,
    }
    small = {p: _small([c for c in made if c.pattern == p], job.batch) for p in PATTERNS}
    at = {p: made.index(c) for p, c in small.items()}
    begun = {s.input for s in job.states if s.how == BUFFER}
    probed: dict[str, probe.Answers] = {
        p: ([None if k in begun else x for k, x in enumerate(c.stacked())], found[at[p]].truth) for p, c in small.items()
    }
    return wides, verification, probed, _kernels(job, wides, held, small["shared"])


def _wide_records(
    job: Job,
    subject: verify.Subject,
    wides: Sequence[Wide],
    held: weight_files.Weights,
    made: Sequence[verify.Call],
    found: Sequence[verify.Answers],
    pools: Sequence[Pool],
) -> dict[str, Any]:
    """Comparison (b) of every wide program: its record, by pattern and number. Raises: VerificationError naming the first wrong node."""
    records: dict[str, Any] = {}
    for number, wide in enumerate(wides):
        weights = all_weights(wide.lowered.program, held, job.count)
        checked = verify.check_wide(subject, wide.lowered.program, weights, wide.pattern, made, found, pools)
        wrong = next((w for p in checked if (w := p.wrong())), "")
        if wrong:
            simplified = job.simple(wide.pattern)
            call = next(c for c in made if c.pattern == wide.pattern)
            where = verify.bisect(subject, simplified, wide.lowered, weights, call)
            raise VerificationError(
                f"the wide program ({job.entry}, {wide.pattern}) is wrong: {wrong}. {where or 'no single node is out of bounds'}{verify.of_bits(simplified[0])}. Nothing was written; please report it, or build with --strategy loop"
            )
        records[f"{wide.pattern}.{number}"] = [p.record() for p in checked]
    return records


def _refuse_example(job: Job, subject: verify.Subject) -> None:
    """Refuse an example that member 0 does not take, of members that are programs: a module has run it before its capture. Raises: CaptureError."""
    if not isinstance(job.factory, Programs) or subject.module is None:
        return
    inputs = verify.like_example(subject, 0)
    try:
        verify.run_module(subject.module(0), subject, inputs)
    except Exception as e:
        leaves = [replace(leaf, example=x) for leaf, x in zip(job.first.inputs, inputs)]
        args, kwargs = subject.bind(inputs)
        why = why_not(Trial(subject.module(0), job.entry, args, kwargs, leaves, job.first.sizes))
        raise CaptureError(why or f"{type(subject.module(0)).__name__} does not take the example: {type(e).__name__}: {e}") from e


def _small(made: Sequence[verify.Call], batch: str) -> verify.Call:
    """The call at batch 2, or the first smaller or larger one that there is."""
    order = [f"{batch}=2", f"{batch}=1", f"{batch}=5"]
    return min(made, key=lambda c: order.index(c.label) if c.label in order else len(order))


def _kernels(job: Job, wides: Sequence[Wide], held: weight_files.Weights, call: verify.Call) -> tuple[int, int]:
    """Kernels of one call of member 0, and of the first wide program of pattern `shared`."""
    own = Executable(job.programs[job.captures.signatures[0]], job.weights_of(0, held), CPU)
    wide = next(w for w in wides if w.pattern == "shared").lowered.program
    run = Executable(wide, all_weights(wide, held, job.count), CPU)
    return kernels(own.forward, [*own.weights, *call.inputs[0]]), kernels(run.forward, [*run.weights, *call.stacked()])


def _write_programs(writer: Writer, jobs: Sequence[Job], wides: Mapping[str, Sequence[Wide]], pt2: bool) -> form.Manifest:
    table = jobs[0].table
    records = tuple(form.Member(n, c.path, c.sha256(), c.bytes) for n, c in zip(table.aligned.names, table.aligned.checkpoints))
    entries = {job.entry: _write_entry(writer, job, wides[job.entry], pt2) for job in jobs}
    return form.Manifest(members=records, weights=tuple(r.weight for r in table.rows), entries=entries)


def _write_entry(writer: Writer, job: Job, wides: Sequence[Wide], pt2: bool) -> form.Entry:
    first = job.first
    members = [writer.file(f"programs/member.{job.entry}", "json", strict_json.canonical(p.to_json())) for p in job.programs]
    rows: list[form.WideProgram] = []
    for wide in wides:
        data = strict_json.canonical(wide.lowered.program.to_json())
        for plan in wide.uses:
            name = writer.file(f"programs/{plan.device}.{job.entry}.{plan.pattern}", "json", data)
            rows.append(form.WideProgram(plan.device, plan.pattern, name, plan.batch, plan.to_json()))
    kinds_out = [o.kind for o in next(w for w in wides if w.pattern == "shared").lowered.program.outputs]
    exported: dict[str, str] = {}
    keywords = frozenset(first.inputs[i].name for _, k, t, _ in first.signature if k == "keyword" for i in tree.paths(t))
    result = first.result
    if job.states:  # (result, {state: new value}), and the states as keywords: y, state = model(x, **state)
        keywords |= {s.name for s in job.states}
        result = {"tuple": [result, {"dict": [[placeholder(s.name), {"leaf": s.output}] for s in job.states]}]}
    for pattern in PATTERNS if pt2 else ():
        program = wide_only(job, wides, pattern)
        data = export_program(program, job.shapes[0].fakes, {d: (a, b) for d, (a, b, _) in first.dims.items()}, result, keywords)
        exported[pattern] = writer.file(f"programs/{job.entry}.{pattern}", "pt2", data)
    return form.Entry(
        inputs=tuple(form.Input(s.name, s.type, s.low, s.high) for s in job.sources),
        signature=list(first.signature),
        outputs=tuple(form.OutputLeaf(n, t, k) for (n, t), k in zip(first.outputs, kinds_out)),
        result=first.result,
        dims={d: form.Dim(least, most, source, first.sizes[d]) for d, (least, most, source) in first.dims.items()},
        guards=tuple(form.Guard(g.expr, g.source) for g in first.guards),
        fixed=list(first.fixed),
        member=members,
        signatures=list(job.captures.signatures),
        wide=tuple(rows),
        pt2=exported,
        state=tuple(form.State(s.input, s.output, job.initial(s)) for s in job.states),
    )


def _provenance(factory: Factory, opened: Sequence[Any], asked: Choice, stages: Stages) -> dict[str, Any]:
    return {
        "widepack": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])[:2000],
        "model": factory.call[:500],
        "dtype": str(factory.dtype or "").removeprefix("torch."),
        "strategy": [asked.whole, *asked.preferred],
        "git": _git_commit(),
        "seconds": dict(stages.seconds),
    }


def _git_commit() -> str:
    """The commit of the working folder, if it is in a git checkout."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
