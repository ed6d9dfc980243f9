"""Compares a member program that draws random numbers with the members' own modules, both from one seed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from widepack_artifacts.program import Program

from ..capture.attributes import attributes_of, differences
from ..errors import VerificationError
from ..ir.overlapping import copy_into
from ..spec.draws import InputSource, draw_all
from ..verification.own_module import generator_states, moved_since
from ..verification.tolerance import FLOAT64_EPS, ErrorStats, reference_of
from .check_gradients import trained
from .gradient_causes import way_out
from .gradient_differences import WAY_OUT, compare_gradients
from .member_runs import LiveMembers, run_module, run_program
from .programs import CPU, FusedEntry

FLOAT64_ULPS = 1000
"""The error of float64 members that is accepted. A wrong program is off by more."""


def check_draws(
    fused: LiveMembers,
    entry: FusedEntry,
    program: Program,
    resting: Program,
    sources: Sequence[InputSource],
    gradients: bool,
) -> None:
    """Compares a member program that draws with the members' own modules, both from one seed.

    The module's answers are the reference, since float64 would draw other numbers. The bound is that of
    outputs without a float64 reference. If it is exceeded, the own error is that of the program without its
    draws, which has a float64 reference, in parts of the answers' rms.

    resting: the program without its draws. sources: how the inputs are drawn. Raises: VerificationError for
    other outputs, and with `gradients` for other gradients.
    """
    names = trained(fused, entry) if gradients else []
    for i in range(len(fused)):
        leaves = draw_all(sources, entry.sizes, 3 + i)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(29 + i)
            outputs, grads = run_program(fused, entry, program, i, leaves, names)
            torch.manual_seed(29 + i)
            expected, expected_grads = run_module(fused, i, leaves, names)
        if wrong := _difference(fused, entry, resting, i, leaves, outputs, expected):
            raise VerificationError(
                f"the captured program differs from the module of member {i}, with the same seed of torch: "
                f"{wrong}. {_why_draws_differ(fused, i, leaves, expected)}"
            )
        if not i:
            _refuse_kept(fused, leaves)
        why = partial(way_out, fused, entry, program, i, leaves, names)
        compare_gradients(i, grads, expected_grads, expected_grads, way_out=why)


def _difference(
    fused: LiveMembers,
    entry: FusedEntry,
    resting: Program,
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
        stats = ErrorStats(entry.captured.outputs[k][0])
        stats.add_own(own, reference_of(own))
        if stats.eps == FLOAT64_EPS:
            stats.accept_float64(FLOAT64_ULPS)
        else:
            stats.widen()
        stats.add_wide("", "", y, own, reference_of(own))
        found.append(stats)
    if any(map(_out_of_bounds, found)):
        _raise_to_resting(fused, entry, resting, i, leaves, found)
    return next((words for s in found if (words := _out_of_bounds(s))), "")


def _out_of_bounds(stats: ErrorStats) -> str:
    """Returns how the last answer of an output is out of bounds; "" if it is right."""
    row, words = stats.wide[-1], ""
    if row.words:
        words = row.words
    elif not row.largest <= stats.max_bound:
        words = f"largest error {row.largest:.2e} (bound {stats.max_bound:.2e})"
    elif not row.rms <= stats.rms_bound():
        words = f"rms error {row.rms:.2e} (bound {stats.rms_bound():.2e})"
    return words and f"output {stats.name or 0}: {words}"


def _raise_to_resting(
    fused: LiveMembers,
    entry: FusedEntry,
    resting: Program,
    i: int,
    leaves: Sequence[torch.Tensor],
    stats: Sequence[ErrorStats],
) -> None:
    """Raises the own errors of outputs to those of member i's program without its draws, where it is defined
    in float64.
    """
    try:
        own, _ = run_program(fused, entry, resting, i, leaves, [])
        exact, _ = run_program(fused, entry, resting, i, leaves, [], exact=True)
    except (RuntimeError, TypeError, ValueError):
        return
    for output, mine, truth in zip(stats, own, exact):
        at_rest = ErrorStats(output.name)
        if mine.shape == truth.shape:
            at_rest.add_own(mine.detach(), truth.detach())
        if at_rest.scale and not at_rest.unsteady():
            size = output.scale / at_rest.scale
            output.raise_own(at_rest.own_rms * size, at_rest.own_max * size)


def _refuse_kept(fused: LiveMembers, leaves: Sequence[torch.Tensor]) -> None:
    """Refuses members that keep something outside of their buffers from one call to the next.

    Member 0 runs twice from one seed of torch and with the same buffers. Raises: VerificationError.
    """
    member = fused.member(0, CPU)
    buffers = {name: b.clone() for name, b in member.named_buffers()}
    answers = []
    with torch.random.fork_rng(devices=[]):
        for _ in range(2):
            torch.manual_seed(29)
            with torch.no_grad():
                for name, b in member.named_buffers():
                    if name in buffers and b.shape == buffers[name].shape:
                        copy_into(b, buffers[name])
            before = attributes_of(member)
            answers.append(run_module(fused, 0, leaves, [], member=member)[0])
    if not all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(*answers)):
        changed = [d.path for d in differences(before, attributes_of(member))]
        names = ", ".join(changed[:5])
        what = f"leaves other values in {names}, which" if names else "keeps something that"
        raise VerificationError(
            f"forward {what} the next call reads: member 0 answers otherwise in a second call from the same "
            "seed of torch. Make what it keeps a buffer with register_buffer, and draw from torch's default "
            "generator"
        )


def _why_draws_differ(
    fused: LiveMembers, i: int, leaves: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]
) -> str:
    """Returns what a second run of member i's module shows. expected: what it answered from the same seed."""
    before = generator_states()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(29 + i)
        again, _ = run_module(fused, i, leaves, [])
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
