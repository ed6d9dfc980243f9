"""Computes the members' reference answers, and runs comparison (a) on the way.

Comparison (a): the user's own module of member i against the member program with the weights of member i, in
    one dtype, at batch sizes that differ from the export's. It finds a wrong capture. `same_program.py`
    compares what no answer shows: an eps within rounding, a bound that is not reached.
Comparison (b): the wide program against the member program in float64 (`reference.py`). It finds a wrong
    lowering. If it fails, a bisect names the first wrong node.

Members run one at a time. The bound of every answer is in `tolerance.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import VerificationError
from ..kernels.exact_norms import as_torch_computes
from ..system.memory import bytes_lacking, give_back
from .own_module import OwnModules, why_unsteady
from .rounding import add_rounding, coarsest, scale_by_terms
from .subject import AnsweredCalls, Subject, VerifiedCall
from .tolerance import WITHOUT_FLOAT64, few_count, floating, reference_of


def collect(
    subject: Subject, calls: Sequence[VerifiedCall], progress: Callable[[int, int], None] | None = None
) -> AnsweredCalls:
    """Computes every member's own and float64 answers, and runs comparison (a).

    Raises: VerificationError for a wrong capture, and for members whose answers cannot be verified.
    """
    answered = AnsweredCalls.of(subject, calls)
    stats, modules = answered.stats, OwnModules(answered)
    for i in range(len(subject.members)):
        subject.readahead([i])
        run_program(answered, i)
        give_back()
        if subject.module is not None:
            modules.run(i)
            give_back()
        if progress:
            progress(i + 1, len(subject.members))
    coarse = coarsest(subject.program(0))
    if answered.float64:
        scale_by_terms(answered, coarse)
    add_rounding(answered, coarse)
    unsteady = next((w for s, eps in zip(stats, coarse) if answered.float64 and (w := s.unsteady(eps))), "")
    if unsteady:
        if not _repeatable(answered):
            raise VerificationError(f"{unsteady}, and change from run to run: {why_unsteady(subject, 0)}")
        # Float64 decides otherwise at a threshold (the bucket of a position, the winner of a topk).
        answered.float64 = False
        for s in stats:
            if s.own_rms > max(WITHOUT_FLOAT64, s.eps) * s.scale:  # the bound is that of smaller errors
                s.say_doubt(s.own_rms)
        _use_own_answers(answered)
    modules.check()
    return answered


def collect_shifted(subject: Subject, calls: Sequence[VerifiedCall]) -> AnsweredCalls:
    """Computes every member's own and float64 answers to calls that are outside of the example's range.

    Their bounds are their own, as their errors are. Returns: the answers; without calls if members are not
    defined there: an answer is not finite, float64 is no reference, or a few numbers are so large that the
    errors of all others do not count, as answers of `exp` are.
    """
    answered, nothing = AnsweredCalls.of(subject, calls), AnsweredCalls.of(subject, ())
    for i in range(len(subject.members)):
        try:
            run_program(answered, i)
        except VerificationError:  # another member than the first refuses such numbers
            return nothing
        own = [o for answer in answered.found for o in answer.own[i] if floating(o)]
        if not answered.float64 or not all(torch.isfinite(o).all() for o in own):
            return nothing
        give_back()
    coarse = coarsest(subject.program(0))
    scale_by_terms(answered, coarse)
    if any(s.unsteady(eps) for s, eps in zip(answered.stats, coarse)) or _few_count(answered):
        return nothing
    add_rounding(answered, coarse)
    return nothing if any(s.doubt for s in answered.stats) else answered


def _few_count(answered: AnsweredCalls) -> bool:
    """Returns whether a few numbers are far larger than all others among a member's answers in an output."""
    return any(
        few_count(torch.cat([a.truth[i][k].reshape(-1) for a in answered.found]))
        for i in range(len(answered.subject.members))
        for k in range(len(answered.stats) if answered.found else 0)
    )


def _use_own_answers(answered: AnsweredCalls) -> None:
    """Makes the members' own answers the reference."""
    for answer in answered.found:
        answer.truth = [[reference_of(o) for o in own] for own in answer.own]
    # One call's answers may be those of two patterns.
    distinct = list({id(own): own for answer in answered.found for own in answer.own}.values())
    for k, output in enumerate(answered.stats):
        output.restart()
        for own in distinct:
            output.add_own(own[k], reference_of(own[k]))


def run_program(answered: AnsweredCalls, i: int) -> None:
    """Computes and adds member i's own answers and its float64 answers, and notes if these do not exist.

    Raises: VerificationError if the program fails for this member.
    """
    subject = answered.subject
    weights = subject.arguments(i)
    exact_answer = subject.float64_function(i, weights)
    # For each call the answers that the next step takes its states from.
    left: list[tuple[list[Any], list[Any]]] = []
    for call, into in zip(answered.calls, answered.found):
        before = left[call.after] if call.after is not None else ([], [])
        same = answered.earlier(call, i)
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
                has_float64 = all(t.shape == o.shape for t, o in zip(truth, own))  # not of bits of floats
            except RuntimeError as e:  # an op without a float64 kernel
                if bytes_lacking(e):
                    raise
                has_float64 = False
            if not has_float64:  # the own answer is the reference
                truth = [o.to(torch.float64) if o.is_floating_point() else o for o in own]
                answered.float64 = False
        into.own.append(own)
        into.truth.append(
            [t.to(torch.float64) if floating(o) and not t.is_complex() else t for t, o in zip(truth, own)]
        )
        for output, o, t in zip(answered.stats, own, into.truth[-1]):
            output.add_own(o, t)
        left.append((own, truth) if subject.states else ([], []))


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


def _repeatable(answered: AnsweredCalls) -> bool:
    """Returns whether all members give the same answers again, bit for bit."""
    subject, found = answered.subject, answered.found
    for i in range(len(subject.members)):
        run, weights = subject.run(i), subject.arguments(i)
        for call, answer in zip(answered.calls, found):
            before = found[call.after].own[i] if call.after is not None else ()
            with torch.inference_mode(), as_torch_computes():
                again = run(*weights, *subject.with_states(call.inputs[i], before))
            if not all(torch.equal(a.nan_to_num(), o.nan_to_num()) for a, o in zip(again, answer.own[i])):
                return False
    return True
