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

from ..errors import VerificationError, WidepackError
from ..ir.random_ops import without_randomness
from ..system.progress import Stages
from ..verification import calls, small_sizes
from ..verification.reference import ReferenceAnswers
from ..verification.subject import fitting
from .check_draws import check_draws
from .check_gradients import check_gradients
from .gradients import WAY_OUT
from .member_runs import FLOAT64_ULPS, MemberRuns
from .members import FusedMembers
from .programs import CPU, FusedEntry, Runner


def check(fused: FusedMembers, entry: FusedEntry, runner: Runner) -> None:
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


def _check(fused: FusedMembers, entry: FusedEntry, runner: Runner) -> None:
    (program,) = entry.programs
    runs, wide_resting = _runs(fused, entry), without_randomness(runner.program)
    if runs is None or wide_resting is None:
        return
    if not any(runner.stacked) or all(runner.stacked):
        # the members' modules draw, or were compared already
        subject = replace(runs.subject, module=None) if entry.capture_compared else runs.subject
        pattern = "each" if any(runner.stacked) else "shared"
        answers = ReferenceAnswers(
            entry, subject, LiveWeights(runs.weights), calls.calls(subject, [pattern]), Stages(None)
        )
        answers.accept_float64(FLOAT64_ULPS)
        answers.check(pattern, wide_resting, runner.plan, None, WAY_OUT)
    if runs.draws and not entry.capture_compared:
        check_draws(runs, program, gradients=runner.gradients)
    if runner.gradients:
        check_gradients(runs, runner)


def _runs(fused: FusedMembers, entry: FusedEntry) -> MemberRuns | None:
    """Returns what runs single members; None if a random op of their program has no fixed form."""
    resting = without_randomness(entry.programs[0])
    draws = entry.random and not fused.drops_only_when_fused
    return None if resting is None else MemberRuns(fused, entry, resting, draws)


class LiveWeights:
    """The fused module's weights, with the interface of an artifact's weights files."""

    def __init__(self, values: Mapping[str, torch.Tensor]) -> None:
        self.values = values

    def get(self, name: str) -> torch.Tensor:
        return self.values[name]


def settle(fused: FusedMembers, entry: FusedEntry) -> None:
    """Runs member 0 at small sizes, as a build does, and corrects the entry's conditions.

    It finds the guards of the export that the member does not need, and the dims where the program is not
    valid at a size of 1 (`squeeze()`; a batch norm that trains refuses one row).
    """
    if (runs := _runs(fused, entry)) is None:
        return
    subject = runs.subject
    if runs.draws:
        not_at_one = {}
        for letter in entry.sizes:
            sizes = {**entry.sizes, letter: 1}
            if subject.fits(sizes) and (why := _difference_at(runs, sizes)):
                not_at_one[letter] = why
        entry.restrict((), not_at_one)
        return
    subject = replace(subject, module=lambda i: fused.member(0, CPU))
    guards = [g.expr for g in entry.captured.guards]
    entry.restrict(small_sizes.needless(subject, entry.bounds, guards), {})
    for letter in entry.sizes:
        fits = fitting(entry.bounds, [g.expr for g in entry.captured.guards])
        if why := small_sizes.difference_at_one(replace(subject, fits=fits), letter):
            entry.restrict((), {letter: why})


def _difference_at(runs: MemberRuns, sizes: Mapping[str, int]) -> str:
    """Returns, in words, how member 0 and its program, which draw, differ at these sizes; an empty text if
    they do not.

    They are compared in whether they answer, and in shapes.
    """
    (inputs,) = runs.subject.draw(sizes, 3, "shared", 1)
    leaves = inputs[: runs.entry.input_count]
    what = "the captured program"
    with torch.random.fork_rng(devices=[]):
        try:
            computed, _ = runs.run_program(runs.entry.programs[0], 0, leaves)
            what = "the member itself"
            expected, _ = runs.run_module(0, leaves)
        except (RuntimeError, ValueError, IndexError, AssertionError, ZeroDivisionError) as e:
            first_line = (str(e).splitlines() or [""])[0][:200]
            return f"{what} fails there: {type(e).__name__}: {first_line}".rstrip(": ")
    for a, b in zip(computed, expected):
        if a.shape != b.shape:
            return f"the member gives {list(b.shape)} there, its program {list(a.shape)}"
    return ""
