"""What a build proves of one entry: both comparisons of every program, the small sizes, the probe's answers, and the kernels of a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from widepack_artifacts import tree
from widepack_artifacts import weights as weight_files
from widepack_artifacts.program import Program

from . import probe, small_sizes, verify
from .ahead import extents, parts_of, will_read
from .compare import Pool
from .counting import kernels
from .errors import CaptureError, VerificationError
from .exported_programs import Programs
from .job import Job, all_weights, filled_member
from .kinds import weights_only
from .memory import give_back
from .parts import lowered, parts
from .progress import Stages
from .replay import CPU
from .runtime import graph_module
from .state import BUFFER
from .trial import Trial, why_not
from .wides import PATTERNS, Wide, same_programs


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


def prove(
    job: Job, wides: list[Wide], plain: Callable[[], list[Wide]], held: weight_files.Weights, files: Sequence[Path], stages: Stages
) -> tuple[list[Wide], dict[str, Any], dict[str, probe.Answers], tuple[int, int]]:
    """Both comparisons of every program of an entry. held, files: the weights that were written. plain: makes those without packed convolutions, which add up in another order than some networks bear.

    Returns: the programs that are right; the record, the probe's calls by pattern, and the kernels of a call. Raises: VerificationError.
    """
    where = extents(files)

    def ask(members: Sequence[int]) -> None:
        """Have the parts of these members read: a page that is missing would bring megabytes of other members' with it."""
        will_read(extent for row in job.table.rows for extent in parts_of(row.weight, where, job.count, members))

    one = cache(partial(filled_member, job.factory, job.aligned, 0))
    subject = replace(_subject(job, held), module=lambda i: one())  # small sizes are asked of member 0 alone, many times
    _refuse_example(job, subject)
    if gone := small_sizes.needless(subject, job.bounds, [g.expr for g in job.first.guards]):
        job.first = replace(job.first, guards=tuple(g for i, g in enumerate(job.first.guards) if i not in gone))
    for letter in job.first.sizes:
        if why := small_sizes.way_at_one(replace(subject, fits=_fits(job)), letter):
            job.at_least_two(letter, why)
    one.cache_clear()
    subject = replace(_subject(job, held), made=subject.made, ask=ask)
    made = verify.calls(subject, PATTERNS)
    pools = [Pool(n) for n, _ in job.first.outputs]
    found, captured, raised = verify.answers(subject, made, pools, stages.step)
    if not raised:
        verify.widen(pools)

    def wide_records(some: Sequence[Wide]) -> tuple[dict[str, Any], dict[str, int]]:
        return _wide_records(job, subject, some, held, made, found, pools)

    try:
        records, in_parts = wide_records(wides)
    except VerificationError:
        others = plain()
        if same_programs(others, wides):
            raise
        wides, (records, in_parts) = others, wide_records(others)
    verification = {
        "calls": [f"{c.pattern} {c.label}" for c in made],
        "truth": "float64" if raised else "float32 (an op has no float64 kernel, or decides otherwise in it); bound 1e-5 of the scale",
        "nested_tensor_fast_path": "off",
        "capture": [p.record() for p in captured],
        "wide": records,
        **({"parts": in_parts} if in_parts else {}),
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
) -> tuple[dict[str, Any], dict[str, int]]:
    """Comparison (b) of every wide program: its record, by pattern and number; and how many members a part had, of those that were compared in parts.

    Raises: VerificationError naming the first wrong node.
    """
    records: dict[str, Any] = {}
    in_parts: dict[str, int] = {}
    for number, wide in enumerate(wides):
        checked = [Pool(p.name, p.eps, p.own_square, p.own_max, p.scale_square, p.count) for p in pools]
        divided = parts(job, wide.pattern, wide.lowered.program, wide.plan, wide.lowered)
        for part in divided:
            weights = all_weights(part.program, held, job.count, part.members)
            give_back()
            subject.ask(part.members)
            verify.check_wide(subject, part.program, weights, wide.pattern, made, found, checked, part.members)
            if wrong := next((w for p in checked if (w := p.wrong())), ""):
                simplified = job.simple(wide.pattern)
                call = next(c for c in made if c.pattern == wide.pattern)
                where = verify.bisect(subject, simplified, part.lowered, weights, call, part.members) if part.lowered is not None else ""
                raise VerificationError(
                    f"the wide program ({job.entry}, {wide.pattern}) is wrong: {wrong}. {where or 'no single node is out of bounds'}{verify.of_bits(simplified[0])}. Nothing was written; please report it, or build with --strategy loop"
                )
        records[f"{wide.pattern}.{number}"] = [p.record() for p in checked]
        if len(divided) > 1:
            in_parts[f"{wide.pattern}.{number}"] = len(divided[0].members)
    return records, in_parts


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

    def of(program: Program, weights: Mapping[str, Any], inputs: Sequence[torch.Tensor]) -> int:
        early = weights_only(program)
        counted = [n.name not in early for n in program.nodes]
        return kernels(graph_module(program, CPU), [*(weights[s.source] for s in program.weights), *inputs], counted)

    def of_members(members: range, program: Program) -> int:
        return of(program, all_weights(program, held, job.count, members), call.stacked(members))

    wide = next(w for w in wides if w.pattern == "shared")
    if len(parts(job, wide.pattern, wide.lowered.program, wide.plan, wide.lowered)) == 1:
        found = of_members(range(job.count), wide.lowered.program)
    else:  # a loop has as many more as it has members
        two, three = (of_members(range(n), lowered(job, wide.pattern, wide.plan, job.signatures[:n]).program) for n in (2, 3))
        found = two + (job.count - 2) * (three - two)
    return of(job.programs[job.captures.signatures[0]], job.weights_of(0, held), call.inputs[0]), found
