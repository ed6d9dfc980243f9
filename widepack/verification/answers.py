"""Computes the members' reference answers, and runs comparison (a) on the way.

Comparison (a): the user's own module of member i against the member program with the weights of member i, in
    one dtype, at batch sizes that differ from the export's. It finds a wrong capture. `same_program.py`
    compares what no answer shows: an eps within rounding, a bound that is not reached.
Comparison (b): the wide program against the member program in float64 (`wide.py`). It finds a wrong lowering.
    If it fails, a bisect names the first wrong node.

Members run one at a time. The bound of every answer is in `tolerance.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import VerificationError
from ..ir.cast import raise_value
from ..kernels.exact_norms import as_torch_computes
from ..system.memory import give_back
from .coarse_eps import coarsest
from .float64_members import add_rounding
from .own_module import OwnModules
from .subject import MemberAnswers, Subject, VerifiedCall, earlier_answers
from .term_sizes import scale_by_terms
from .tolerance import ErrorStats, floating, reference_of
from .unsteady import why_unsteady

LATE_BYTES = 16 * 2**20  # of a member's weights: larger ones are raised to float64 layer by layer


@dataclass(frozen=True)
class VerifiedAnswers:
    """The results of a verification for the members.

    Attributes:
        answers: For each call the members' own answers and their float64 answers.
        captured: For each output the errors that comparison (a) measured.
        float64: Whether the reference is float64. If not, the members' own answers are the reference.
    """

    answers: list[MemberAnswers]
    captured: list[ErrorStats]
    float64: bool


@dataclass(frozen=True)
class ShiftedAnswers:
    """The members' answers to calls with an offset. Their bounds are their own, as their errors are.

    Attributes:
        calls: The calls.
        answers: For each call the members' own answers and their float64 answers.
        stats: For each output the members' own errors in these calls.
    """

    calls: list[VerifiedCall]
    answers: list[MemberAnswers]
    stats: list[ErrorStats]


def collect(
    subject: Subject,
    calls: Sequence[VerifiedCall],
    stats: Sequence[ErrorStats],
    progress: Callable[[int, int], None] | None = None,
) -> VerifiedAnswers:
    """Computes every member's own and float64 answers, and runs comparison (a).

    stats: for each output; gets the members' own errors.
    Raises: VerificationError for a wrong capture, and for members whose answers cannot be verified.
    """
    found = [MemberAnswers() for _ in calls]
    modules = OwnModules(subject, calls, [ErrorStats(s.name) for s in stats])
    float64 = True
    for i in range(len(subject.members)):
        subject.readahead([i])
        float64 = run_program(subject, i, calls, found, stats) and float64
        give_back()
        if subject.module is not None:
            modules.run(i, found)
            give_back()
        if progress:
            progress(i + 1, len(subject.members))
    coarse = coarsest(subject.program(0))
    if float64:
        scale_by_terms(subject, calls, stats, coarse)
    in_double = [k for k, eps in enumerate(coarse) if eps == torch.finfo(torch.float64).eps]
    if in_double:
        add_rounding(subject, calls, found, stats, in_double)
    unsteady = next((w for s, eps in zip(stats, coarse) if float64 and (w := s.unsteady(eps))), "")
    if unsteady:
        if not _repeatable(subject, calls, found):
            raise VerificationError(f"{unsteady}, and change from run to run: {why_unsteady(subject, 0)}")
        # Float64 decides otherwise at a threshold (the bucket of a position, the winner of a topk).
        float64 = False
        for s, eps in zip(stats, coarse):
            if s.unsteady(eps):
                s.say_doubt(s.own_rms)
        _use_own_answers(found, stats)
    modules.check(stats, float64)
    return VerifiedAnswers(found, modules.captured, float64)


def collect_shifted(subject: Subject, calls: Sequence[VerifiedCall], names: Sequence[str]) -> ShiftedAnswers:
    """Computes every member's own and float64 answers to calls that are outside of the example's range.

    Returns: the answers; without calls if members are not defined there: an answer is not finite, or float64
    is no reference.
    """
    found, stats = [MemberAnswers() for _ in calls], [ErrorStats(name) for name in names]
    nothing = ShiftedAnswers([], [], stats)
    for i in range(len(subject.members)):
        try:
            if not run_program(subject, i, calls, found, stats):
                return nothing
        except VerificationError:  # another member than the first refuses such numbers
            return nothing
        if not all(torch.isfinite(o).all() for answer in found for o in answer.own[i] if floating(o)):
            return nothing
        give_back()
    coarse = coarsest(subject.program(0))
    scale_by_terms(subject, calls, stats, coarse)
    if any(s.unsteady(eps) for s, eps in zip(stats, coarse)):
        return nothing
    in_double = [k for k, eps in enumerate(coarse) if eps == torch.finfo(torch.float64).eps]
    if in_double and calls:
        add_rounding(subject, calls, found, stats, in_double)
        if any(s.doubt for s in stats):
            return nothing
    return ShiftedAnswers(list(calls), found, stats)


def _use_own_answers(found: Sequence[MemberAnswers], stats: Sequence[ErrorStats]) -> None:
    """Makes the members' own answers the reference."""
    for answer in found:
        answer.truth = [[reference_of(o) for o in own] for own in answer.own]
    # One call's answers may be those of two patterns.
    distinct = list({id(own): own for answer in found for own in answer.own}.values())
    for k, output in enumerate(stats):
        output.restart()
        for own in distinct:
            output.add_own(own[k], reference_of(own[k]))


def run_program(
    subject: Subject,
    i: int,
    calls: Sequence[VerifiedCall],
    found: Sequence[MemberAnswers],
    stats: Sequence[ErrorStats],
) -> bool:
    """Computes member i's own answers and its float64 answers, and adds them to `found` and `stats`.

    Returns: whether the float64 answers exist. Raises: VerificationError if the program fails for this
    member.
    """
    weights = subject.arguments(i)
    exact_answer = float64_function(subject, i, weights)
    float64 = True
    left: list[
        tuple[list[Any], list[Any]]
    ] = []  # for each call the answers that the next step takes its states from
    for call, into in zip(calls, found):
        before = left[call.after] if call.after is not None else ([], [])
        same = earlier_answers(calls, found, call, i)
        if same is not None:  # the same inputs in another pattern
            into.own.append(same.own[i])
            into.truth.append(same.truth[i])
            left.append(([], []))
            continue
        inputs, exact = (subject.with_states(call.inputs[i], b) for b in before)
        with torch.inference_mode():
            own = _own_answer(subject, i, call, weights, inputs)
            try:
                truth = exact_answer(exact)
            except RuntimeError:  # an op without a float64 kernel: the member's own answer is the reference
                truth, float64 = [o.to(torch.float64) if o.is_floating_point() else o for o in own], False
        into.own.append(own)
        into.truth.append(
            [t.to(torch.float64) if floating(o) and not t.is_complex() else t for t, o in zip(truth, own)]
        )
        for output, o, t in zip(stats, own, into.truth[-1]):
            output.add_own(o, t)
        left.append((own, truth) if subject.states else ([], []))
    return float64


def float64_function(
    subject: Subject, i: int, weights: Sequence[Any]
) -> Callable[[Sequence[torch.Tensor]], list[Any]]:
    """Returns what computes the outputs of member i in float64 from its inputs.

    Args:
        subject: The members.
        i: The member.
        weights: Its weights, in the order of its program.
    """
    # To raise all weights at once is faster, but takes twice a member's memory.
    late = sum(w.nbytes for w in weights) > LATE_BYTES
    doubles = weights if late else [raise_value(w) for w in weights]

    def answer(inputs: Sequence[torch.Tensor]) -> list[Any]:
        run = subject.run(i, exact=not late, late=late)
        return list(run(*doubles, *(raise_value(x) for x in inputs)))

    return answer


def _own_answer(
    subject: Subject, i: int, call: VerifiedCall, weights: Sequence[Any], inputs: Sequence[torch.Tensor]
) -> list[Any]:
    """Returns member i's own answer. Raises: VerificationError if its program fails."""
    try:
        with as_torch_computes():
            return list(subject.run(i)(*weights, *inputs))
    except (RuntimeError, IndexError, ValueError) as e:
        # Member 0 has answered. Something in this member's weights fails, for example NaN in an eigenvalue
        # problem.
        raise VerificationError(
            f"member {subject.members[i]} fails at {call.label}, where member {subject.members[0]} answers: "
            f"{type(e).__name__}: {' '.join(str(e).split())[:300]}; look at its weights, or leave it out"
        ) from e


def _repeatable(subject: Subject, calls: Sequence[VerifiedCall], found: Sequence[MemberAnswers]) -> bool:
    """Returns whether all members give the same answers again, bit for bit."""
    for i in range(len(subject.members)):
        run, weights = subject.run(i), subject.arguments(i)
        for call, answer in zip(calls, found):
            before = found[call.after].own[i] if call.after is not None else ()
            with torch.inference_mode(), as_torch_computes():
                again = run(*weights, *subject.with_states(call.inputs[i], before))
            if not all(torch.equal(a.nan_to_num(), o.nan_to_num()) for a, o in zip(again, answer.own[i])):
                return False
    return True
