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

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from widepack_artifacts.errors import some
from widepack_artifacts.program import Program

from ..capture.attributes import attributes_of, differences
from ..errors import VerificationError, WidepackError
from ..ir.overlapping import copy_into
from ..ir.random_ops import without_randomness
from ..system.progress import Stages
from ..verification import calls, small_sizes
from ..verification.own_module import generator_states, moved_since
from ..verification.reference import ReferenceAnswers
from ..verification.tolerance import FLOAT64_EPS, ErrorStats, reference_of
from .check_gradients import check_gradients, way_out
from .gradients import WAY_OUT, compare_gradients
from .member_runs import FLOAT64_ULPS, LiveMemberRuns
from .members import FusedMembers
from .programs import CPU, FusedEntry, Runner

SEED = 29  # of torch, for a program that draws and the module that it is compared with


def check(fused: FusedMembers, entry: FusedEntry, runner: Runner) -> None:
    """Raises VerificationError if the outputs or gradients of a program differ from the members', or if they
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
        _check_draws(runs, program, gradients=runner.gradients)
    if runner.gradients:
        check_gradients(runs, runner)


def _runs(fused: FusedMembers, entry: FusedEntry) -> LiveMemberRuns | None:
    """Returns what runs single members; None if a random op of their program has no fixed form."""
    resting = without_randomness(entry.programs[0])
    draws = entry.random and not fused.drops_only_when_fused
    return None if resting is None else LiveMemberRuns(fused, entry, resting, draws)


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
    entry.restrict(*small_sizes.corrections(subject, entry))


def _difference_at(runs: LiveMemberRuns, sizes: Mapping[str, int]) -> str:
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


# ---------------------------------------------------------------- members that draw


def _check_draws(runs: LiveMemberRuns, program: Program, gradients: bool) -> None:
    """Compares a member program that draws with the members' own modules, both from one seed.

    The module's outputs are the reference, since float64 would draw other numbers. The bound is that of
    outputs without a float64 reference. If it is exceeded, the own error is that of the program without its
    draws, which has a float64 reference, in parts of the outputs' rms.

    Raises: VerificationError for other outputs, and with `gradients` for other gradients.
    """
    names = runs.trained if gradients else []
    for i in range(len(runs.fused)):
        leaves = runs.inputs(3 + i)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED + i)
            outputs, grads = runs.run_program(program, i, leaves, names)
            torch.manual_seed(SEED + i)
            expected, expected_grads = runs.run_module(i, leaves, names)
        if wrong := _difference(runs, i, leaves, outputs, expected):
            raise VerificationError(
                f"the captured program differs from the module of member {i}, with the same seed of torch: "
                f"{wrong}. {_why_draws_differ(runs, i, leaves, expected)}"
            )
        if not i:
            _refuse_kept(runs, leaves)
        why = partial(way_out, runs, program, i, leaves, names)
        compare_gradients(i, grads, expected_grads, expected_grads, way_out=why)


def _difference(
    runs: LiveMemberRuns,
    i: int,
    leaves: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
) -> str:
    """Returns the first output of member i that is out of bounds; "" if all are right.

    outputs: those of the captured program. expected: those of the module.
    """
    if len(outputs) != len(expected):
        return f"{len(outputs)} outputs, the module's own {len(expected)}"
    found = []
    for k, (y, own) in enumerate(zip(outputs, expected)):
        y, own = y.detach(), own.detach()
        stats = ErrorStats(runs.entry.output_names[k])
        stats.add_own(own, reference_of(own))
        if stats.eps == FLOAT64_EPS:
            stats.accept_float64(FLOAT64_ULPS)
        else:
            stats.widen()
        stats.add_wide("", "", y, own, reference_of(own))
        found.append(stats)
    if any(map(_out_of_bounds, found)):
        _raise_to_resting(runs, i, leaves, found)
    return next((words for s in found if (words := _out_of_bounds(s))), "")


def _out_of_bounds(stats: ErrorStats) -> str:
    """Returns how the last value of an output is out of bounds; "" if it is right."""
    row, words = stats.wide[-1], ""
    if row.words:
        words = row.words
    elif not row.largest <= stats.max_bound:
        words = f"largest error {row.largest:.2e} (bound {stats.max_bound:.2e})"
    elif not row.rms <= stats.rms_bound():
        words = f"rms error {row.rms:.2e} (bound {stats.rms_bound():.2e})"
    return words and f"output {stats.name or 0}: {words}"


def _raise_to_resting(
    runs: LiveMemberRuns, i: int, leaves: Sequence[torch.Tensor], stats: Sequence[ErrorStats]
) -> None:
    """Raises the own errors of outputs to those of member i's program without its draws, where it is defined
    in float64.
    """
    try:
        own, _ = runs.run_program(runs.resting, i, leaves)
        exact, _ = runs.run_program(runs.resting, i, leaves, exact=True)
    except (RuntimeError, TypeError, ValueError):
        return
    for output, mine, truth in zip(stats, own, exact):
        at_rest = ErrorStats(output.name)
        if mine.shape == truth.shape:
            at_rest.add_own(mine.detach(), truth.detach())
        if at_rest.scale and not at_rest.unsteady():
            size = output.scale / at_rest.scale
            output.raise_own(at_rest.own_rms * size, at_rest.own_max * size)


def _refuse_kept(runs: LiveMemberRuns, leaves: Sequence[torch.Tensor]) -> None:
    """Refuses members that keep something outside of their buffers from one call to the next.

    Member 0 runs twice from one seed of torch and with the same buffers. Raises: VerificationError.
    """
    member = runs.fused.member(0, CPU)
    buffers = {name: b.clone() for name, b in member.named_buffers()}
    outputs = []
    with torch.random.fork_rng(devices=[]):
        for _ in range(2):
            torch.manual_seed(SEED)
            with torch.no_grad():
                for name, b in member.named_buffers():
                    if name in buffers and b.shape == buffers[name].shape:
                        copy_into(b, buffers[name])
            before = attributes_of(member)
            outputs.append(runs.run_module(0, leaves, member=member)[0])
    if not all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(*outputs)):
        changed = [d.path for d in differences(before, attributes_of(member))]
        names = some(changed)
        what = f"leaves other values in {names}, which" if names else "keeps something that"
        raise VerificationError(
            f"forward {what} the next call reads: member 0 answers otherwise in a second call from the same "
            "seed of torch. Make what it keeps a buffer with register_buffer, and draw from torch's default "
            "generator"
        )


def _why_draws_differ(
    runs: LiveMemberRuns, i: int, leaves: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]
) -> str:
    """Returns what a second run of member i's module shows. expected: what it answered from the same seed."""
    before = generator_states()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED + i)
        again, _ = runs.run_module(i, leaves)
    moved = [name for name in moved_since(before) if name != "torch"]
    if moved:
        return (
            f"The module draws from the generator of {' and '.join(moved)}, and its captured program does "
            "not. Draw with torch, or make what it draws an input"
        )
    if not all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(again, expected)):
        return (
            "The module answers otherwise in a second run with this seed, and draws no number of Python's "
            "random or numpy.random: it reads something else that changes from run to run. Make what changes "
            "an input"
        )
    return f"The module answers the same in a second run with this seed. {WAY_OUT}"
