"""Runs comparison (a): the answers of the user's own modules against those of the captured program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..errors import VerificationError, WidepackError
from ..kernels.exact_norms import as_torch_computes
from .capture_causes import answers_change, cause, cause_of_failure, kept_between_calls
from .module_run import run_module
from .op_record import Recorded
from .subject import AnsweredCalls, Subject
from .tolerance import ErrorStats, reference_of
from .unsteady import why_unsteady

_NOT_SHOWN = "No comparison shows the cause. Please report it, with the member's code"


class OwnModules:
    """Compares the answers of the members' own modules with those of the programs.

    Attributes:
        answered: The programs' answers; `captured` gets the errors of the modules' answers against them.
        ordered: For each output the own errors of the members whose modules have weights in another memory
            order than the files, with the weights in that order.
    """

    def __init__(self, answered: AnsweredCalls) -> None:
        self.answered = answered
        self.ordered = [ErrorStats(name) for name in answered.subject.outputs]

    def run(self, i: int) -> None:
        """Runs member i's module on the user's calls, after the program has answered them.

        The module is built when the program's float64 weights are freed. Raises: VerificationError.
        """
        answered, subject = self.answered, self.answered.subject
        assert subject.module is not None
        module = subject.module(i)
        if subject.same_program is not None and subject.same_program.note_module(i, module):
            del module
            module = subject.module(i)
        record = True  # the first call
        ordered = _in_order_of(module, subject, i)
        left: list[list[Any]] = []  # for each call what the module returned
        for call, into in zip(answered.calls, answered.found):
            theirs: list[torch.Tensor] = []
            if call.user and answered.earlier(call, i) is None:
                inputs = subject.with_states(
                    call.inputs[i], left[call.after] if call.after is not None else ()
                )
                returned = _module_answer(subject, i, module, inputs, call.label, record)
                theirs = _tensors(subject, i, returned, into.own[i])
                record = False
                for output, y, o in zip(answered.captured, theirs, into.own[i]):
                    output.add_wide(subject.members[i], call.label, y, o, reference_of(o))
                if ordered and call.after is None:
                    with torch.inference_mode(), as_torch_computes():
                        own = subject.run(i)(*ordered, *call.inputs[i])
                    for output, o, t in zip(self.ordered, own, into.truth[i]):
                        output.add_own(o, t)
            left.append(theirs if subject.states else [])

    def check(self) -> None:
        """Checks the answers against the bounds of the members' own errors.

        They are raised to those of weights in the modules' own memory order.

        Raises: VerificationError for a wrong capture; MemberMismatch for a member with another program.
        """
        answered, subject = self.answered, self.answered.subject
        for output, errors in zip(self.ordered, answered.stats):
            errors.raise_own(output.own_rms, output.own_max)
        for output, errors in zip(answered.captured, answered.stats):
            output.take_own(errors)
            output.accept_float64(subject.float64_ulps)
            if not answered.float64:
                output.widen()
            member, wrong = output.first_wrong()
            if wrong:
                self._refuse(member, wrong)
        if subject.same_program is not None:
            subject.same_program.check()

    def _refuse(self, member: str, wrong: str) -> None:
        subject, calls = self.answered.subject, self.answered.calls
        i = subject.members.index(member)
        why = kept_between_calls(subject, i, calls)
        if not why and answers_change(subject, calls):
            raise VerificationError(
                f"{wrong}: {subject.method} gives other answers from run to run, so it cannot be verified: "
                f"{why_unsteady(subject, i)}"
            )
        why = why or cause(subject, i, calls) or _NOT_SHOWN
        raise VerificationError(f"the captured program gives other answers than the members: {wrong}. {why}")


def _in_order_of(module: nn.Module, subject: Subject, i: int) -> list[Any]:
    """Returns the weights of member i in the memory order of its module; none if that is the files' order.

    A module in channels-last memory runs other kernels than one with the same numbers in contiguous memory.
    """
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    sources = [s.source for s in subject.program(i).weights]
    if all(name not in own or own[name].is_contiguous() for name in sources):
        return []
    found = []
    for name, value in zip(sources, subject.arguments(i)):
        like = own.get(name)
        if like is not None and isinstance(value, torch.Tensor) and like.shape == value.shape:
            value = torch.empty_like(like, dtype=value.dtype).copy_(value)
        found.append(value)
    return found


def _module_answer(
    subject: Subject, i: int, module: nn.Module, inputs: Sequence[torch.Tensor], label: str, record: bool
) -> list[Any]:
    """Returns what member i's module returns. record: whether its operations are recorded.

    Raises: VerificationError if the module fails.
    """
    same_program = subject.same_program
    try:
        if record and same_program is not None:
            recorded = Recorded()
            try:
                found = run_module(module, subject, inputs, recorded)
            except Exception:  # noqa: BLE001  # an op of the user's may not accept a mode: run without a record
                same_program.note_operations(i, None)
            else:
                same_program.note_operations(i, recorded.operations)
                return found
        return run_module(module, subject, inputs)
    except (MemoryError, WidepackError):
        raise
    except Exception as e:
        raise VerificationError(
            f"member {subject.members[i]}: its own module fails at {label}, where the captured program "
            "answers: "
            f"{type(e).__name__}: {' '.join(str(e).split())[:300]}. {cause_of_failure(subject, i, inputs)}"
        ) from e


def _tensors(
    subject: Subject, i: int, returned: Sequence[Any], own: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Returns the tensors that a module returned.

    own: the program's outputs. Raises: VerificationError if the rest differs from what the program returns.
    """
    member, numbers = subject.members[i], subject.numbers
    tensors = [x for x in returned if isinstance(x, torch.Tensor)]
    # A field that is None may be no leaf of the member's own class.
    rest = [x for x in returned if x is not None and not isinstance(x, torch.Tensor)]
    if rest != [x for x in numbers if x is not None]:
        raise VerificationError(
            f"member {member} returns {rest} beside its tensors, the captured program {list(numbers)}: "
            "numbers in the result belong to the program and must be the same for all members and calls; "
            f"return them as tensors, or leave them out{_sentence(subject.explain(i))}"
        )
    if len(tensors) != len(own):
        raise VerificationError(
            f"member {member} gives {len(tensors)} tensors, the captured program {len(own)}; "
            f"what forward returns must not depend on values{_sentence(subject.explain(i))}"
        )
    return tensors


def _sentence(words: str) -> str:
    """Returns words as the next sentence of a message; "" if there are none."""
    return f". {words}" if words else ""
