"""`widepack.build`: checkpoints -> artifact. (A module of the function's own name would take its place in the package.)

Stages: read, align, capture, lower, write weights, verify, export, publish. Nothing is published before both comparisons have passed.
"""

from __future__ import annotations

import datetime
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from widepack_artifacts import manifest as form
from widepack_artifacts import strict_json, tree
from widepack_artifacts import weights as weight_files
from widepack_artifacts.store import Writer

from . import probe, verify
from .checkpoints import listed, member_names
from .codec import dtype_of
from .compare import Pool
from .counting import kernels
from .errors import CaptureError, UsageError, VerificationError, WidepackError
from .exported import export_program
from .exported_programs import Programs
from .job import Job, Row, all_weights, capture_members, filled_member
from .kinds import kinds
from .members import Factory, read_names
from .models import find_dtype
from .progress import Report, Stages
from .reading import read_members
from .registry import Choice
from .replay import CPU
from .runtime import Executable
from .specs import parse_inputs
from .version import __version__
from .wides import PATTERNS, Wide, make_wides, wide_only, wide_share

TARGETS = ("cpu", "cuda")


@dataclass(frozen=True)
class BuildReport:
    """What a build made, and how well.

    wide_share: of the nodes that read a Stacked weight, the part that runs in a strategy other than sequential and loop. kernels_member, kernels_wide: of one
    call at batch 2, the weight prologue aside. kinds: nodes by kind. strategies: nodes by strategy, pattern `shared` on the CPU at the smallest batch class.
    seconds: by stage. weights: bytes by kind. left_out: the checkpoints that are no members, with `skip_bad`: number among those given, path, and why.
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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def build(
    checkpoints: Sequence[str | Path],
    out: str | Path,
    *,
    model: str | Callable[..., nn.Module] | None = None,
    model_args: Mapping[str, Any] | None = None,
    inputs: Sequence[str] | None = None,
    sample: Sequence[Any] | None = None,
    sample_kwargs: Mapping[str, Any] | None = None,
    dynamic: Mapping[str, Any] | None = None,
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
    progress: Report | None = None,
) -> BuildReport:
    """Fuse N checkpoints of one architecture into an artifact, and prove it right.

    checkpoints: N files of torch.save, safetensors or torch.export, indexes of shards, or folders of one. out: the folder to make. model:
    `"pkg.mod:factory"`, `"file.py:factory"`, `"hf"` (transformers, by the config.json beside the first checkpoint) or a callable; it may take `state_dict=` so
    that heads of other sizes can be built; torch.export programs and pickled modules need none. inputs: specs such as `x=float32[B,3,32,32]`; or sample and
    sample_kwargs: one call's inputs, with dynamic {name: {axis: "B"}} (default: axis 0 is "B"). names: the members', as a list, a text `A,B`, or a file of one
    a line. key: where the state dict is in each file. dtype: what all floating weights are converted to. trust_pickle: run the code that pickled files name.
    skip_bad: build without the checkpoints that cannot be read or are of another model. strategy: auto, wide, loop, or strategies of ops. share: auto, or
    none: equal weights stay the members' own. pt2: torch.export programs too. dry_run: everything but the artifact. progress: called with (stage, done, total).

    Raises: UsageError, CheckpointError, MemberMismatch, CaptureError, LoweringError, VerificationError, ArtifactError. Nothing is published then.
    """
    asked = Choice.parse(strategy)
    for target in targets:
        if target not in TARGETS:
            raise UsageError(f"unknown target {target!r}; known: {', '.join(TARGETS)}")
    paths = listed(checkpoints)
    given_names = read_names(names, len(paths)) if names is not None else member_names(paths)
    wanted = find_dtype(dtype)
    if inputs:
        parse_inputs(inputs)  # a typo is told before anything is read
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
            )
        with stages.stage("capture"):
            try:
                captured = capture_members(factory, aligned, inputs, sample, sample_kwargs, dynamic)
            except CaptureError as e:
                if wanted is None:
                    raise
                raise CaptureError(
                    f"{e}. The members were converted to {dtype}, inputs are not: describe them in the dtype that the model takes then"
                ) from e
        job = Job(factory, aligned, captured, share)
        if isinstance(writer, Writer):
            writer.reserve(sum(r.weight.bytes(job.count) for r in job.rows))
        with stages.stage("lower"):
            wides = make_wides(job, asked, targets)
            report = replace(_report(job, wides, str(out), stages), left_out=[b._asdict() for b in left_out])
        if dry_run:
            return replace(report, seconds=stages.seconds)
        assert isinstance(writer, Writer)
        with stages.stage("write weights"):
            weights_name = _write_weights(writer, job)
        held = weight_files.Weights([writer.place(weights_name)])
        with stages.stage("verify"):
            try:
                verification, probe_tensors, counts = _verify(job, wides, held, stages)
            except (RuntimeError, IndexError, ValueError) as e:
                if not isinstance(factory, Programs) or isinstance(e, WidepackError):
                    raise
                raise VerificationError(
                    f"a member's program fails at sizes that it was not exported with: {type(e).__name__}: {' '.join(str(e).split())[:300]}. Describe its inputs "
                    "with --input: equal letters are equal sizes there, and integers can be bounded"
                ) from e
        with stages.stage("export"):
            manifest = _write_programs(writer, job, wides, pt2)
            probe_name = _write_tensors(writer, "probe", probe_tensors)
        with stages.stage("publish"):
            provenance = _provenance(factory, aligned.checkpoints, asked, stages) | {"left_out": report.left_out}
            manifest = replace(manifest, probe=probe_name, verification=verification, provenance=provenance)
            manifest = writer.publish(manifest)
        disk = sum(f.bytes for f in manifest.files.values())
        return replace(
            report,
            seconds=stages.seconds,
            verification=verification,
            bytes_disk=disk,
            digest=manifest.digest,
            kernels_member=counts[0],
            kernels_wide=counts[1],
        )


class _Nothing:
    """In a dry run, what stands for the writer."""

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *_: object) -> None:
        return None


def _report(job: Job, wides: Sequence[Wide], out: str, stages: Stages) -> BuildReport:
    wide = next(w for w in wides if w.pattern == "shared")
    slots = job.slots("shared")
    program = job.simple("shared")[0]
    found = kinds(program, slots)
    by_kind = {k: sum(found[n.name] == k for n in program.nodes) for k in ("shared", "stacked", "ragged")}
    weights = {k: sum(r.weight.bytes(job.count) for r in job.rows if r.weight.kind == k) for k in ("shared", "stacked", "ragged")}
    strategies: dict[str, int] = {}
    for used in wide.lowered.used.values():
        strategies[used] = strategies.get(used, 0) + 1
    return BuildReport(
        path=out,
        members=tuple(job.aligned.names),
        wide_share=wide_share(program, found, wide.lowered.used),
        kernels_member=0,
        kernels_wide=0,
        kinds=by_kind,
        strategies=strategies,
        seconds=stages.seconds,
        verification={},
        weights=weights,
        bytes_disk=sum(weights.values()),
        bytes_memory=sum(weights.values()),
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


def _write_weights(writer: Writer, job: Job) -> str:
    def parts(row: Row) -> Callable[[], Iterator[torch.Tensor]]:
        return lambda: (row.value(i) for i in range(job.count if row.weight.kind == "stacked" else 1))

    entries: list[tuple[str, Sequence[int], torch.dtype, Callable[[], Iterator[torch.Tensor]]]] = []
    for row in job.rows:
        w = row.weight
        if w.kind == "ragged":
            entries += [(f"{w.name}@{i}", w.shape[i], dtype_of(w.dtype), lambda r=row, i=i: iter([r.value(i)])) for i in range(job.count)]  # type: ignore[misc]
        else:
            entries.append((w.name, w.tensors(job.count)[w.name], dtype_of(w.dtype), parts(row)))
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
        built = [(n, k, tree.build(t, list(leaves), lambda name, rows: dict(rows))) for n, k, t, _ in first.signature]
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
        bind=bind,
        numbers=tree.numbers(first.result),
        fits=verify.fitting({d: (least, most) for d, (least, most, _) in first.dims.items()}, [g.expr for g in first.guards]),
    )


def _verify(
    job: Job, wides: Sequence[Wide], held: weight_files.Weights, stages: Stages
) -> tuple[dict[str, Any], dict[str, torch.Tensor], tuple[int, int]]:
    """Both comparisons of every program; the record, the probe, and the kernels of a call."""
    for letter in job.first.sizes:
        if why := verify.way_at_one(_subject(job, held), letter):
            job.at_least_two(letter, why)
    subject = _subject(job, held)
    made = verify.calls(subject, PATTERNS)
    pools = [Pool(n) for n, _ in job.first.outputs]
    found, captured, raised = verify.answers(subject, made, pools, stages.step)
    if not raised:
        verify.widen(pools)
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
                f"the wide program ({wide.pattern}) is wrong: {wrong}. {where or 'no single node is out of bounds'}. Nothing was written; please report it, or build with --strategy loop"
            )
        records[f"{wide.pattern}.{number}"] = [p.record() for p in checked]
    verification = {
        "calls": [f"{c.pattern} {c.label}" for c in made],
        "truth": "float64" if raised else "float32 (an op has no float64 kernel); bound 1e-5 of the scale",
        "nested_tensor_fast_path": "off",
        "capture": [p.record() for p in captured],
        "wide": records,
        "torch": torch.__version__,
    }
    small = {p: _small([c for c in made if c.pattern == p], job.batch) for p in PATTERNS}
    at = {p: made.index(c) for p, c in small.items()}
    probed = probe.make({p: (c.stacked(), found[at[p]].truth) for p, c in small.items()})
    return verification, probed, _kernels(job, wides, held, small["shared"])


def _small(made: Sequence[verify.Call], batch: str) -> verify.Call:
    """The call at batch 2, or the first smaller or larger one that there is."""
    order = [f"{batch}=2", f"{batch}=1", f"{batch}=5"]
    return min(made, key=lambda c: order.index(c.label) if c.label in order else len(order))


def _kernels(job: Job, wides: Sequence[Wide], held: weight_files.Weights, call: verify.Call) -> tuple[int, int]:
    """Kernels of one call of member 0, and of the first wide program of pattern `shared`."""
    own = Executable(job.programs[job.captures.signatures[0]], job.weights_of(0, held), CPU)
    wide = next(w for w in wides if w.pattern == "shared").lowered.program
    run = Executable(wide, all_weights(wide, held, job.count), CPU)
    return kernels(own.forward, [*own.weights, *call.inputs[0]]), kernels(run.forward, [*run.weights, *call.inputs[0]])


def _write_programs(writer: Writer, job: Job, wides: Sequence[Wide], pt2: bool) -> form.Manifest:
    first = job.first
    members = [writer.file("programs/member.forward", "json", strict_json.canonical(p.to_json())) for p in job.programs]
    rows: list[form.WideProgram] = []
    for wide in wides:
        data = strict_json.canonical(wide.lowered.program.to_json())
        for plan in wide.uses:
            name = writer.file(f"programs/{plan.device}.forward.{plan.pattern}", "json", data)
            rows.append(form.WideProgram(plan.device, plan.pattern, name, plan.batch, plan.to_json()))
    kinds_out = [o.kind for o in next(w for w in wides if w.pattern == "shared").lowered.program.outputs]
    exported: dict[str, str] = {}
    keywords = frozenset(first.inputs[i].name for _, k, t, _ in first.signature if k == "keyword" for i in tree.paths(t))
    for pattern in PATTERNS if pt2 else ():
        program = wide_only(job, wides, pattern)
        data = export_program(program, first.sizes, {d: (a, b) for d, (a, b, _) in first.dims.items()}, first.result, keywords)
        exported[pattern] = writer.file(f"programs/forward.{pattern}", "pt2", data)
    entry = form.Entry(
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
    )
    records = tuple(form.Member(n, c.path, c.sha256(), c.bytes) for n, c in zip(job.aligned.names, job.aligned.checkpoints))
    return form.Manifest(members=records, weights=tuple(r.weight for r in job.rows), entries={"forward": entry})


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
