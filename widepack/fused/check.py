"""Compares a fused module with its members, for `validate=`: each program when it is made.

There is one program for each mode, pattern of inputs and batch class.

1. Both comparisons of a build (`widepack.verification`), at the batches of a build, if the inputs are all
shared or all
   have a member axis.
2. The gradients of a program that has them. The loss is a random weighted sum of all outputs. The gradients
of every
   weight that trains are compared with each member's own, at the sample's sizes.

A program that draws (dropout) draws other numbers for all members than for one after the other. So the wide
program is compared without its random ops (ir/random_ops.py), and the capture is compared with the members'
own modules, both from one seed. A program with a random op that has no fixed form is not compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from widepack_artifacts import tree
from widepack_artifacts.program import Program

from ..errors import VerificationError, WidepackError
from ..ir.random_ops import without_randomness
from ..spec.state import BUFFER, CarriedState
from ..system.progress import Stages
from ..verification import calls, small_sizes
from ..verification.reference import ReferenceAnswers
from ..verification.subject import Subject, fitting, with_accepted_inputs
from .check_draws import FLOAT64_ULPS, check_draws
from .check_gradients import check_gradients
from .gradient_differences import WAY_OUT
from .member_runs import LiveMembers, run_module, run_program, sample_with
from .programs import CPU, FusedEntry, Runner


def check(fused: LiveMembers, entry: FusedEntry, runner: Runner) -> None:
    """Raises VerificationError if the answers or gradients of a program differ from the members', or if they
    cannot be compared.
    """
    try:
        _check(fused, entry, runner)
    except (RuntimeError, ValueError, IndexError, TypeError, AttributeError, ZeroDivisionError) as e:
        if isinstance(e, WidepackError):
            raise
        first_line = (str(e).splitlines() or [""])[0][:200]
        raise VerificationError(
            f"the answers of the fused module cannot be compared with the members' own: {type(e).__name__}: "
            f"{first_line}.\nThe inputs of the comparison are drawn: the members may refuse some of them. "
            "validate=False skips the comparison."
        ) from e


def _check(fused: LiveMembers, entry: FusedEntry, runner: Runner) -> None:
    (program,) = entry.programs
    members_draw = entry.random and not fused.drops_only_when_fused
    resting, wide_resting = without_randomness(program), without_randomness(runner.program)
    if resting is None or wide_resting is None:
        return
    if not any(runner.stacked) or all(runner.stacked):
        _check_answers(fused, entry, runner, resting, wide_resting, members_draw or entry.capture_compared)
    sources = subject_for(fused, entry, resting, members_draw).sources[: entry.input_count]
    if members_draw and not entry.capture_compared:
        check_draws(fused, entry, program, resting, sources, gradients=runner.gradients)
    if runner.gradients:
        check_gradients(fused, entry, runner, resting, sources, members_draw)


class LiveWeights:
    """The fused module's weights, with the interface of an artifact's weights files."""

    def __init__(self, values: Mapping[str, torch.Tensor]) -> None:
        self.values = values

    def get(self, name: str) -> torch.Tensor:
        return self.values[name]


def settle(fused: LiveMembers, entry: FusedEntry) -> None:
    """Runs member 0 at small sizes, as a build does, and corrects the entry's conditions.

    It finds the guards of the export that the member does not need, and the dims where the program is not
    valid at a size of 1 (`squeeze()`; a batch norm that trains refuses one row).
    """
    (program,) = entry.programs
    members_draw = entry.random and not fused.drops_only_when_fused
    resting = without_randomness(program)
    if resting is None:
        return
    subject = subject_for(fused, entry, resting, members_draw)
    if members_draw:
        not_at_one = {}
        for letter in entry.sizes:
            sizes = {**entry.sizes, letter: 1}
            if subject.fits(sizes) and (why := _difference_at(fused, entry, subject, program, sizes)):
                not_at_one[letter] = why
        entry.restrict((), not_at_one)
        return
    subject = replace(subject, module=lambda i: fused.member(0, CPU))
    entry.restrict(small_sizes.needless(subject, entry.bounds, entry.conditions), {})
    for letter in entry.sizes:
        if why := small_sizes.difference_at_one(
            replace(subject, fits=fitting(entry.bounds, entry.conditions)), letter
        ):
            entry.restrict((), {letter: why})


def _difference_at(
    fused: LiveMembers, entry: FusedEntry, subject: Subject, program: Program, sizes: Mapping[str, int]
) -> str:
    """Returns, in words, how member 0 and its program, which draw, differ at these sizes; an empty text if
    they do not.

    They are compared in whether they answer, and in shapes.
    """
    (inputs,) = subject.draw(sizes, 3, "shared", 1)
    leaves = inputs[: entry.input_count]
    runs = "the captured program"
    with torch.random.fork_rng(devices=[]):
        try:
            computed, _ = run_program(fused, entry, program, 0, leaves, [])
            runs = "the member itself"
            expected, _ = run_module(fused, 0, leaves, [])
        except (RuntimeError, ValueError, IndexError, AssertionError, ZeroDivisionError) as e:
            first_line = (str(e).splitlines() or [""])[0][:200]
            return f"{runs} fails there: {type(e).__name__}: {first_line}".rstrip(": ")
    for a, b in zip(computed, expected):
        if a.shape != b.shape:
            return f"the member gives {list(b.shape)} there, its program {list(a.shape)}"
    return ""


def subject_for(fused: LiveMembers, entry: FusedEntry, resting: Program, without_modules: bool) -> Subject:
    """Returns the subject of a comparison: the member program at rest, and the members' modules if these are
    compared.
    """
    weights = {n: v.detach().cpu() for n, v in fused.tensors_of(entry).items()}

    def initial(i: int, state: CarriedState) -> torch.Tensor | None:
        return fused.tensor_of(state.name).detach().cpu()[i] if state.how == BUFFER else None

    subject = Subject(
        members=tuple(f"{i}" for i in range(len(fused))),
        programs=[resting],
        signatures=entry.signatures,
        sources=entry.sources,
        outputs=entry.output_names,
        sizes=entry.sizes,
        batch=entry.batch,
        weights=lambda i: {n: v[i] if entry.kinds[n] == "stacked" else v for n, v in weights.items()},
        module=None if without_modules else lambda i: fused.member(i, CPU),
        bind=lambda leaves: sample_with(fused, leaves),
        fits=fitting(entry.bounds, entry.conditions),
        numbers=tree.numbers(entry.returned),
        states=entry.states,
        rests=fused.drops_only_when_fused,
        initial=initial,
        float64_ulps=FLOAT64_ULPS,
    )
    return with_accepted_inputs(subject)


def _check_answers(
    fused: LiveMembers,
    entry: FusedEntry,
    runner: Runner,
    resting: Program,
    wide_resting: Program,
    without_modules: bool,
) -> None:
    """Runs both comparisons of a build on the member program and the wide program, both at rest.

    `without_modules`: runs the second only, because the members' modules draw or were compared already.
    """
    subject = subject_for(fused, entry, resting, without_modules)
    weights = {n: v.detach().cpu() for n, v in fused.tensors_of(entry).items()}
    pattern = "each" if any(runner.stacked) else "shared"
    answers = ReferenceAnswers(
        entry,
        subject,
        LiveWeights(weights),
        calls.calls(subject, [pattern]),
        Stages(None),
    )
    answers.accept_float64(FLOAT64_ULPS)
    answers.check(pattern, wide_resting, runner.plan, None, WAY_OUT)
