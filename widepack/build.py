"""`widepack.build`: checkpoints -> artifact.

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
from widepack_artifacts.program import Kind, Program
from widepack_artifacts.store import Writer

from . import probe, verify
from .capture import Captured, arrange, capture, tensors_of
from .checkpoints import member_names, open_all
from .codec import dtype_name, dtype_of
from .compare import Pool
from .counting import kernels
from .errors import CaptureError, MemberMismatch, UsageError, VerificationError
from .exported import export_program
from .kinds import kinds, weights_only
from .lower import Lowered, lower
from .members import Alignment, Factory, align, bit_equal, load_factory
from .plan import Choice as PlanChoice
from .plan import Plan
from .progress import Report, Stages
from .registry import REGISTRY, Choice
from .replay import CPU
from .rules_of_thumb import plans
from .runtime import Executable, graph_module, split
from .samples import Source
from .sampling import default_axes, example_sizes, from_specs
from .simplify import simplify_all
from .specs import parse_inputs
from .version import __version__

PATTERNS = ("shared", "each")
TARGETS = ("cpu", "cuda")


@dataclass(frozen=True)
class BuildReport:
    """What a build made, and how well.

    wide_share: of the nodes that read a Stacked weight, the part that runs in a strategy other than sequential and loop. kernels_member, kernels_wide: of one
    call at batch 2, the weight prologue aside. kinds: nodes by kind. strategies: nodes by strategy, pattern `shared` on the CPU at the smallest batch class.
    seconds: by stage. weights: bytes by kind.
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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Row:
    """A row of the weights table in the making: values(i) is member i's tensor."""

    weight: form.Weight
    value: Callable[[int], torch.Tensor]


@dataclass(frozen=True)
class Wide:
    """One wide program and all that it is for: (device, pattern, batch class, plan)."""

    pattern: str
    lowered: Lowered
    uses: list[Plan]


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
    names: Sequence[str] | None = None,
    key: str | None = None,
    strategy: str | Sequence[str] = "auto",
    targets: Sequence[str] = TARGETS,
    share: str = "auto",
    pt2: bool = True,
    force: bool = False,
    dry_run: bool = False,
    progress: Report | None = None,
) -> BuildReport:
    """Fuse N checkpoints of one architecture into an artifact, and prove it right.

    checkpoints: N files of torch.save or safetensors. out: the folder to make. model: `"pkg.mod:factory"`, `"file.py:factory"` or a callable; it may take
    `state_dict=` so that heads of other sizes can be built. inputs: specs such as `x=float32[B,3,32,32]`; or sample and sample_kwargs: one call's inputs, with
    dynamic {name: {axis: "B"}} (default: axis 0 is "B"). names: the members'. key: where the state dict is in each file. strategy: auto, wide, loop, or
    strategies of ops. share: auto, or none: equal weights stay the members' own. pt2: torch.export programs too. dry_run: everything but the artifact.
    progress: called with (stage, done, total).

    Raises: UsageError, CheckpointError, MemberMismatch, CaptureError, LoweringError, VerificationError, ArtifactError. Nothing is published then.
    """
    asked = Choice.parse(strategy)
    for target in targets:
        if target not in TARGETS:
            raise UsageError(f"unknown target {target!r}; known: {', '.join(TARGETS)}")
    if not checkpoints:
        raise UsageError("no checkpoints: give at least one file, for example widepack build ckpts/*.pt -o ens.wide")
    if model is None:
        raise UsageError("no model: a state dict holds weights and no code, so name what makes the module: --model package.module:factory, or file.py:factory")
    stages = Stages(progress)
    with Writer(out, force=force) if not dry_run else _Nothing() as writer:
        with stages.stage("read"):
            opened = open_all(list(checkpoints), key)
            factory = load_factory(model, model_args)
            found_names = list(names) if names else member_names([str(c) for c in checkpoints])
            first = _member(factory, opened[0].state_dict())
            aligned = align(opened, found_names, share, first.state_dict(), ragged=factory.takes_state_dict)
        with stages.stage("capture"):
            captured = _capture(factory, aligned, inputs, sample, sample_kwargs, dynamic)
        job = _Job(factory, aligned, captured, share)
        if isinstance(writer, Writer):
            writer.reserve(sum(r.weight.bytes(job.count) for r in job.rows))
        with stages.stage("lower"):
            wides = _wides(job, asked, targets)
            report = _report(job, wides, str(out), stages)
        if dry_run:
            return replace(report, seconds=stages.seconds)
        assert isinstance(writer, Writer)
        with stages.stage("write weights"):
            weights_name = _write_weights(writer, job)
        held = weight_files.Weights([writer._root / weights_name])
        with stages.stage("verify"):
            verification, probe_tensors, counts = _verify(job, wides, held, stages)
        with stages.stage("export"):
            manifest = _write_programs(writer, job, wides, held, pt2, inputs)
            probe_name = _write_tensors(writer, "probe", probe_tensors)
        with stages.stage("publish"):
            provenance = _provenance(factory, opened, asked, stages)
            manifest = replace(manifest, probe=probe_name, verification=verification, provenance=provenance)
            manifest = writer.publish(manifest)
        disk = sum(f.bytes for f in manifest.files.values())
        return replace(report, seconds=stages.seconds, verification=verification, bytes_disk=disk, digest=manifest.digest, kernels_member=counts[0], kernels_wide=counts[1])


class _Nothing:
    """In a dry run, what stands for the writer."""

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *_: object) -> None:
        return None


def _member(factory: Factory, state: Mapping[str, torch.Tensor]) -> nn.Module:
    """A fresh module for a state dict; not filled yet."""
    return factory(state_dict=state)


def _filled(factory: Factory, aligned: Alignment, i: int) -> nn.Module:
    """Member i as the user would load it. Raises: MemberMismatch."""
    state = aligned.state_dict(i)
    module = _member(factory, state)
    try:
        module.load_state_dict(state)
    except RuntimeError as e:
        raise MemberMismatch(f"member {aligned.names[i]}: the model does not take its checkpoint: {' '.join(str(e).split())[:600]}") from e
    return module.eval()


def _capture(factory: Factory, aligned: Alignment, inputs: Sequence[str] | None, sample: Sequence[Any] | None, sample_kwargs: Mapping[str, Any] | None, dynamic: Mapping[str, Any] | None) -> _Captures:
    """One capture a shape signature, from fresh members."""
    signatures = aligned.signatures
    made: list[Captured] = []
    bounds: dict[str, tuple[int, int | None]] = {}
    low_high: dict[str, tuple[int | None, int | None]] = {}
    for number in sorted(set(signatures)):
        module = _filled(factory, aligned, signatures.index(number))
        if inputs:
            if sample is not None or sample_kwargs is not None:
                raise UsageError("inputs and sample are both given; one of them describes a call")
            specs, bounds = parse_inputs(inputs)
            sizes = example_sizes(specs, bounds)
            values, axes = from_specs(specs, sizes)
            low_high = {s.name: (s.low, s.high) for s in specs}
            call = arrange(module, (), values, axes, sizes)
        elif sample is not None or sample_kwargs is not None:
            args, kwargs = tuple(sample or ()), dict(sample_kwargs or {})
            import inspect

            names = [p for p in inspect.signature(module.forward).parameters]
            call = arrange(module, args, kwargs, dynamic if dynamic is not None else default_axes(names, args, kwargs), {})
        else:
            raise UsageError("no inputs: describe each input of forward, for example --input 'x=float32[B,3,32,32]' (letters are dynamic dims), or give a sample")
        made.append(capture(module, call))
    first = made[0]
    for other in made[1:]:
        _same_graph(first, other)
    dims = {d: _meet(found, bounds.get(d)) for d, found in first.dims.items()}
    return _Captures(tuple(made), signatures, replace(first, dims=dims), low_high)


def _meet(found: tuple[int, int | None, str], asked: tuple[int, int | None] | None) -> tuple[int, int | None, str]:
    """The bounds that export found and those that the user gave, both."""
    if asked is None:
        return found
    highs = [h for h in (found[1], asked[1]) if h is not None]
    return max(found[0], asked[0]), min(highs) if highs else None, found[2]


def _same_graph(a: Captured, b: Captured) -> None:
    if [(n.name, n.op) for n in a.program.nodes] != [(n.name, n.op) for n in b.program.nodes]:
        raise CaptureError("members of other shapes give other programs: only sizes may differ between them, the ops must be the same")


@dataclass(frozen=True)
class _Captures:
    """captured: one a shape signature. first: the first, with the dims' final bounds. ranges: bounds of integer inputs by name."""

    captured: tuple[Captured, ...]
    signatures: tuple[int, ...]
    first: Captured
    ranges: dict[str, tuple[int | None, int | None]]


class _Job:
    """All that the later stages need to know of a build."""

    def __init__(self, factory: Factory, aligned: Alignment, captures: _Captures, share: str) -> None:
        self.factory, self.aligned, self.captures, self.share = factory, aligned, captures, share
        self.first = captures.first
        self.count = len(aligned.names)
        self.rows = self._table()
        self.by_name = {name: r for r in self.rows for name in (r.weight.name, *r.weight.aliases)}
        self.programs = [self._canonical(c.program) for c in captures.captured]
        leaves = self.first.inputs
        self.sources = [Source(x.name, x.type, *captures.ranges.get(x.name, (None, None)), example=None if x.name in captures.ranges else x.example) for x in leaves]
        self.batch = self._batch()

    def _batch(self) -> str:
        """The dim that batch classes are made of: the first dynamic dim of the first input that has one."""
        for leaf in self.first.inputs:
            for axis in sorted(leaf.axes):
                return leaf.axes[axis].rpartition("*")[2]
        return ""

    def _table(self) -> list[Row]:
        rows: list[Row] = []
        roles = {n: role for c in self.captures.captured for n, (role, _) in c.weights.items()}
        parameters = {n for n, _ in _member(self.factory, self.aligned.state_dict(0)).named_parameters(remove_duplicate=False)}
        known = set()
        for w in self.aligned.weights:
            role = roles.get(w.name) or ("parameter" if w.name in parameters else "buffer")
            shape: list[Any] = [list(s) for s in w.shape] if w.kind == "ragged" else list(w.shape)  # type: ignore[arg-type]
            rows.append(Row(form.Weight(w.name, w.kind, w.dtype, shape, role, list(w.aliases)), lambda i, n=w.name: self.aligned.tensor(i, n)))  # type: ignore[misc]
            known |= {w.name, *w.aliases}
        lifted = [n for n in self.first.weights if n not in known]
        return rows + self._constants(lifted)

    def _constants(self, names: Sequence[str]) -> list[Row]:
        """Buffers that are not saved and tensors in plain attributes: each member's own, read from the member itself; literals are the program's."""
        if not names:
            return []
        values: dict[str, list[torch.Tensor]] = {n: [] for n in names}
        for i in range(self.count):
            module = _filled(self.factory, self.aligned, i)
            found = {**dict(tensors_of(module)), **dict(module.named_buffers(remove_duplicate=False))}
            for n in names:
                literal = self.first.weights[n][1] if n.startswith("lifted_tensor") else None
                value = found.get(n, literal)
                if value is None:
                    raise CaptureError(f"member {self.aligned.names[i]} has no tensor at {n}, which the captured member holds; members must be made alike")
                values[n].append(value.detach().clone())
        rows = []
        for n, vs in values.items():
            same = all(bit_equal(v, vs[0]) for v in vs)
            if any(v.shape != vs[0].shape or v.dtype != vs[0].dtype for v in vs):
                raise CaptureError(f"the constant {n} differs in shape or dtype between members; make it a buffer that is saved with the checkpoint")
            rows.append(Row(form.Weight(n, "shared" if same else "stacked", dtype_name(vs[0].dtype), list(vs[0].shape), "constant"), lambda i, v=vs: v[i]))  # type: ignore[misc]
        return rows

    def _canonical(self, program: Program) -> Program:
        """The program naming weights as the table does (tied weights have one name there)."""
        return replace(program, weights=tuple(replace(s, source=self.by_name[s.source].weight.name) for s in program.weights))

    def kind(self, name: str) -> Kind:
        return self.by_name[name].weight.kind  # type: ignore[return-value]

    def slots(self, pattern: str) -> dict[str, Kind]:
        """The kind of every weight and input of the member program, by value name."""
        program = self.programs[0]
        return {**{s.name: self.kind(s.source) for s in program.weights}, **{s.name: "shared" if pattern == "shared" else "stacked" for s in program.inputs}}

    def weights_of(self, i: int, held: weight_files.Weights) -> dict[str, Any]:
        """Member i's weights by source name, from the file that was written."""
        out = {}
        for s in self.programs[self.captures.signatures[i]].weights:
            kind = self.kind(s.source)
            out[s.source] = held.get(s.source) if kind == "shared" else held.slice(s.source, i) if kind == "stacked" else held.get(f"{s.source}@{i}")
        return out


def _wides(job: _Job, asked: Choice, targets: Sequence[str]) -> list[Wide]:
    """Plans by rules of thumb for every target and pattern, and the wide program of each different one."""
    made: dict[str, Wide] = {}
    for pattern in PATTERNS:
        slots = job.slots(pattern)
        programs = simplify_all(job.programs, slots, job.first.sizes)
        for device in targets:
            for plan in plans(programs[0], slots, job.count, job.first.sizes, job.batch, device, pattern, asked):
                loops = sorted(n for r in plan.regions if r.strategy == "loop" for n in r.nodes)
                key = f"{pattern} {loops} {sorted((n, c.strategy) for n, c in plan.choices.items())}"
                if key not in made:
                    made[key] = Wide(pattern, lower(programs, job.captures.signatures, slots, plan, job.first.sizes), [])
                made[key].uses.append(_filled_plan(plan, made[key].lowered, programs[0]))
    return list(made.values())


_WHY = {"once": "all that it reads is the same for all members", "part": "one of several results", "sequential": "no strategy of the op applies"}


def _filled_plan(plan: Plan, lowered: Lowered, program: Program) -> Plan:
    """The plan with the strategy of every node that it did not name itself, and why."""
    choices = dict(plan.choices)
    for node in program.nodes:
        used = lowered.used[node.name]
        if node.name not in choices and used != "loop":
            known = REGISTRY[node.op].strategies if node.op in REGISTRY else {}
            choices[node.name] = PlanChoice(used, known[used].note if used in known else _WHY.get(used, ""))
    return replace(plan, choices=choices)


def _report(job: _Job, wides: Sequence[Wide], out: str, stages: Stages) -> BuildReport:
    wide = next(w for w in wides if w.pattern == "shared")
    slots = job.slots("shared")
    program = simplify_all(job.programs, slots, job.first.sizes)[0]
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
        plans=[{"device": p.device, "pattern": p.pattern, "batch": list(p.batch), "strategies": p.strategies(), "because": p.regions[0].because if p.regions else ""} for w in wides for p in w.uses],
    )


def wide_share(program: Program, found: Mapping[str, Kind], used: Mapping[str, str]) -> float:
    """Of the nodes that read a Stacked weight (or one made of such) and run at every call, the part in a strategy other than sequential and loop."""
    from widepack_artifacts.program import refs

    early = weights_only(program)
    reading = [n.name for n in program.nodes if n.name not in early and any(r in early and found[r] == "stacked" for r in refs((n.args, n.kwargs)))]
    return sum(used[n] not in ("sequential", "loop") for n in reading) / len(reading) if reading else 1.0


def _write_weights(writer: Writer, job: _Job) -> str:
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


def all_weights(program: Program, held: weight_files.Weights, members: int) -> dict[str, Any]:
    """The weights of a wide program by source name, mapped."""
    return {s.source: [held.get(f"{s.source}@{i}") for i in range(members)] if s.kind == "ragged" else held.get(s.source) for s in program.weights}


def _subject(job: _Job, held: weight_files.Weights) -> verify.Subject:
    first = job.first

    def bind(leaves: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        built = [(n, k, tree.build(t, list(leaves), lambda name, rows: dict(rows))) for n, k, t in first.signature]
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
        module=lambda i: _filled(job.factory, job.aligned, i),
        bind=bind,
        fits=verify.fitting({d: (least, most) for d, (least, most, _) in first.dims.items()}, [g.expr for g in first.guards]),
    )


def _verify(job: _Job, wides: Sequence[Wide], held: weight_files.Weights, stages: Stages) -> tuple[dict[str, Any], dict[str, torch.Tensor], tuple[int, int]]:
    """Both comparisons of every program; the record, the probe, and the kernels of a call."""
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
            simplified = simplify_all(job.programs, job.slots(wide.pattern), job.first.sizes)
            call = next(c for c in made if c.pattern == wide.pattern)
            where = verify.bisect(subject, simplified, wide.lowered, weights, call)
            raise VerificationError(f"the wide program ({wide.pattern}) is wrong: {wrong}. {where or 'no single node is out of bounds'}. Nothing was written; please report it, or build with --strategy loop")
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


def _kernels(job: _Job, wides: Sequence[Wide], held: weight_files.Weights, call: verify.Call) -> tuple[int, int]:
    """Kernels of one call of member 0, and of the first wide program of pattern `shared`."""
    own = Executable(job.programs[job.captures.signatures[0]], job.weights_of(0, held), CPU)
    wide = next(w for w in wides if w.pattern == "shared").lowered.program
    run = Executable(wide, all_weights(wide, held, job.count), CPU)
    return kernels(own.forward, [*own.weights, *call.inputs[0]]), kernels(run.forward, [*run.weights, *call.inputs[0]])


def _write_programs(writer: Writer, job: _Job, wides: Sequence[Wide], held: weight_files.Weights, pt2: bool, inputs: Sequence[str] | None) -> form.Manifest:
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
    keywords = frozenset(first.inputs[i].name for _, k, t in first.signature if k == "keyword" for i in tree.paths(t))
    for pattern in PATTERNS if pt2 else ():
        program = _wide_only(job, wides, pattern)
        data = export_program(program, first.sizes, {d: (a, b) for d, (a, b, _) in first.dims.items()}, first.result, keywords)
        exported[pattern] = writer.file(f"programs/forward.{pattern}", "pt2", data)
    entry = form.Entry(
        inputs=tuple(form.Input(s.name, s.type, s.low, s.high) for s in job.sources),
        signature=[form.Parameter(n, k, t, False) for n, k, t in first.signature],
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


def _wide_only(job: _Job, wides: Sequence[Wide], pattern: str) -> Program:
    """The program of a pattern without loops but for Ragged values: what torch.export programs are made of."""
    slots = job.slots(pattern)
    programs = simplify_all(job.programs, slots, job.first.sizes)
    (plan,) = plans(programs[0], slots, job.count, job.first.sizes, job.batch, "cpu", pattern, Choice("wide"))
    for wide in wides:
        if wide.pattern == pattern and any(p.regions == plan.regions and p.choices.keys() >= plan.choices.keys() for p in wide.uses):
            return wide.lowered.program
    return lower(programs, job.captures.signatures, slots, plan, job.first.sizes).program


def _provenance(factory: Factory, opened: Sequence[Any], asked: Choice, stages: Stages) -> dict[str, Any]:
    return {
        "widepack": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])[:2000],
        "model": factory.call[:500],
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


__all__ = ["BuildReport", "build", "graph_module", "split"]
