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

from ..verification import probe
from ..verification import small_sizes
from ..verification import answers as verify
from ..system.readahead import asking
from ..runtime.kernel_count import kernels
from ..spec.entries import PATTERNS
from ..errors import CaptureError, VerificationError
from ..capture.pt2.factory import Programs
from .entry import Job, all_weights, filled_member
from ..ir.kinds import weights_only
from ..verification.parts import lowered, parts
from ..system.progress import Stages
from ..ir.fake_values import CPU
from ..ir.at_rest import draws, rested
from ..runtime.graph_module import graph_module
from ..spec.state import BUFFER
from ..capture.trial import Trial, why_not
from ..verification.reference import Compared, Truth
from ..lowering.wide_programs import Wide, same_programs


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
        programs=[at_rest(p, job.entry) for p in job.programs] if job.dropout else job.programs,
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


def at_rest(program: Program, entry: str) -> Program:
    """The program without its draws. Raises: CaptureError for an op that is not known without."""
    found = rested(program)
    if found is None:
        raise CaptureError(
            f"{entry} draws random numbers by an op whose draw cannot be taken out, and nothing can be proved of it; make what it draws an input of {entry}"
        )
    return found


def _fits(job: Job) -> Callable[[Mapping[str, int]], bool]:
    return verify.fitting(job.bounds, [g.expr for g in job.first.guards])


def prove(
    job: Job, wides: list[Wide], plain: Callable[[], list[Wide]], held: weight_files.Weights, files: Sequence[Path], stages: Stages
) -> tuple[list[Wide], dict[str, Any], dict[str, probe.Answers], tuple[int, int]]:
    """Both comparisons of every program of an entry. held, files: the weights that were written. plain: makes those without packed convolutions, which add up in another order than some networks bear.

    Returns: the programs that are right; the record, the probe's calls by pattern, and the kernels of a call. Raises: VerificationError.
    """
    one = cache(partial(filled_member, job.factory, job.aligned, 0))
    subject = replace(_subject(job, held), module=lambda i: one())  # small sizes are asked of member 0 alone, many times
    _refuse_example(job, subject)
    if gone := small_sizes.needless(subject, job.bounds, [g.expr for g in job.first.guards]):
        job.first = replace(job.first, guards=tuple(g for i, g in enumerate(job.first.guards) if i not in gone))
    for letter in job.first.sizes:
        if why := small_sizes.way_at_one(replace(subject, fits=_fits(job)), letter):
            job.at_least_two(letter, why)
    one.cache_clear()
    subject = replace(_subject(job, held), made=subject.made, ask=asking([r.weight for r in job.table.rows], files, job.count))
    truth = Truth(job, subject, held, verify.calls(subject, PATTERNS), stages)

    def compared(some: Sequence[Wide]) -> dict[str, Compared]:
        way_out = "Nothing was written; please report it, or build with --strategy loop"
        found = {}
        for n, w in enumerate(some):
            rests = job.dropout and draws(w.lowered.program)
            program = at_rest(w.lowered.program, job.entry) if rests else w.lowered.program
            found[f"{w.pattern}.{n}"] = truth.hold(w.pattern, program, w.plan, None if rests else w.lowered, way_out)
        return found

    try:
        found = compared(wides)
    except VerificationError:
        others = plain()
        if same_programs(others, wides):
            raise
        wides, found = others, compared(others)
    at_rest_ = {"draws": "at rest: programs that draw random numbers are compared without"} if job.dropout and any(map(draws, job.programs)) else {}
    record = truth.record({"capture": [p.record() for p in truth.captured], **at_rest_}, found)
    return wides, record, truth.probed(), _kernels(job, wides, held, truth.small("shared"))


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
