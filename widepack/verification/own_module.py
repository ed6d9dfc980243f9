"""Runs comparison (a): the answers of the user's own modules against those of the captured program.

If a module answers otherwise, runs find the cause:

| shown by | cause |
|---|---|
| a new module that answers as the program does | it keeps something between calls; what changed is named |
| two modules of one member, or the weights after a run | the tensors that differ are named |
| the member that was captured differs too | no difference of members: the program differs from its module |
| the captured member without attributes of its parameters agrees | torch.export does not see them |
| it agrees while `torch.compiler.is_compiling()` is True | its code does something else then |
| this module with the captured member's weights | members differ in something that is not a weight |
| this module agrees with the program then | the program holds for the values of some weights only |
| one call answers otherwise from run to run | it draws random numbers: the generator that moves is named |

Where a run does not decide, no cause is named.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from widepack_artifacts.errors import some

from ..capture.attributes import attributes_of, differences
from ..capture.reachable import tensors_of
from ..errors import VerificationError, WidepackError
from ..ir.overlapping import copy_into
from ..ir.random_ops import random_nodes, without_randomness
from ..ir.torch_internals import as_if_exported
from ..kernels.exact_norms import as_torch_computes
from .module_run import run_module
from .same_program import Recorded
from .subject import AnsweredCalls, Subject, VerifiedCall
from .tolerance import ErrorStats, reference_of

_CLEAR = 1e-3  # a difference of this part of an answer is no rounding
_ROUNDING = 64  # ulp: a difference of less is rounding
_REPEATS = 8  # of one call: a coin may fall the same way a few times
_REPORT = "Please report it, with the member's code"
_KEEP = (
    'dropout="on" (--dropout on) keeps draws and dropout on in eval mode, with a draw for each member '
    "and call"
)
_NOT_SHOWN = f"No comparison shows the cause. {_REPORT}"


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
    own = _weights(module)
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


def cause(subject: Subject, i: int, calls: Sequence[VerifiedCall]) -> str:
    """Returns sentences about why member i's module answers otherwise than its program; "" if none is shown.

    Args:
        subject: The members. Its modules are made again.
        i: The member.
        calls: The calls of the comparison.
    """
    make = subject.module
    assert make is not None
    runs = [c for c in calls if c.user and c.after is None]
    known, first = subject.explain(i), subject.first_like(i)
    name = subject.members[first]
    if i == first or any(_differ(subject, first, make(first), call) for call in runs):
        if known:
            return (
                f"Modules of {name} differ in something that is not a weight: {known}. Make it a buffer or "
                "an argument of the factory"
            )
        why = _other_tensors(subject, first, runs) or _read_otherwise(subject, first, runs) or _REPORT
        return f"{name} was captured, and its own answers differ from the program's as well. {why}"
    differ = [_differ(subject, first, _with_weights(make(i), make(first)), call) for call in runs]
    if any(differ):
        what = f": {known[:1].lower()}{known[1:]}" if known else ""
        return (
            f"The members differ in something that is not a weight{what}. With the weights of {name}, the "
            f"module of {subject.members[i]} still answers otherwise. Make it a buffer or an argument of the "
            "factory"
        )
    if known:
        return known
    if differ and not any(d is None for d in differ):
        return (
            f"With the weights of {name}, the module of {subject.members[i]} answers as the program does: "
            "the program holds for some values of the weights only. Look for code that reads a weight as a "
            "number"
        )
    return ""


def _other_tensors(subject: Subject, i: int, runs: Sequence[VerifiedCall]) -> str:
    """Returns a sentence about tensors that differ between two modules of member i, or that a run changes."""
    make = subject.module
    assert make is not None
    module = make(i)
    one, other = _with_copies(module) | _copies(_weights(module)), dict(tensors_of(make(i)))
    other |= _weights(make(i))
    drawn = [n for n, (_, copy) in one.items() if n in other and not _equal(copy, other[n])]
    if drawn:
        return (
            f"Two modules of {subject.members[i]}, with the same weights, differ in {some(drawn)}:"
            " the factory is not deterministic, and no checkpoint stores these numbers. Save them in the"
            " checkpoint (a buffer without persistent=False), or draw them with a generator of a fixed seed"
        )
    for call in runs:
        try:
            run_module(module, subject, call.inputs[i])
        except Exception:  # noqa: BLE001  # whatever the user's code raises
            return ""
    written = [n for n, w in _weights(module).items() if n in one and not _equal(one[n][1], w)]
    if written:
        return (
            f"Its {subject.method} writes into {some(written)} where torch.export does not see it"
            " (.data, or without gradients). Compute the value in a new tensor instead, such as self.weight *"
            " self.mask"
        )
    return ""


def _copies(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    return {n: (t, t.detach().clone()) for n, t in tensors.items()}


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())


def _read_otherwise(subject: Subject, i: int, runs: Sequence[VerifiedCall]) -> str:
    """Returns a sentence about what member i's module reads that torch.export sees otherwise, if a run shows
    it: the module answers as the program does without it.
    """
    make = subject.module
    assert make is not None
    module = make(i)
    marked = [value for value in _weights(module).values() if vars(value)]
    for value in marked:
        vars(value).clear()
    if marked and all(_differ(subject, i, module, call) is False for call in runs):
        names = ", ".join(f"{n}.{key}" for n, v in _weights(make(i)).items() for key in vars(v))
        return (
            f"It answers as the program does without {names[:200]}: torch.export does not see attributes of "
            "parameters and buffers. Hold them as attributes of the module"
        )
    module = make(i)
    with as_if_exported():
        same = all(_differ(subject, i, module, call) is False for call in runs)
    if same:
        return (
            "It answers as the program does while torch.compiler.is_compiling() is True: its code does "
            "something else then. Remove the branch from the member"
        )
    return ""


def _weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def cause_of_failure(subject: Subject, i: int, inputs: Sequence[torch.Tensor]) -> str:
    """Returns a sentence about why member i's module fails where its program answers; "" if none is shown."""
    make = subject.module
    assert make is not None
    first = subject.first_like(i)
    if i == first:
        return (
            "It is the member that was captured, so no difference of members is the cause: it does not take "
            "these inputs, which are drawn. Say in the input specs which values it takes"
        )
    for module, words in (
        (make(first), f"{subject.members[first]}, which was captured, fails there, too"),
        (_with_weights(make(i), make(first)), ""),
    ):
        try:
            run_module(module, subject, inputs)
        except Exception:  # noqa: BLE001  # whatever the user's code raises
            if words:
                return f"{words}: it does not take these inputs, which are drawn"
            return (
                "The members differ in something that is not a weight: it fails with the weights of "
                f"{subject.members[first]}, too. {subject.explain(i)}".strip()
            )
    return f"With the weights of {subject.members[first]} it answers"


def kept_between_calls(subject: Subject, i: int, calls: Sequence[VerifiedCall]) -> str:
    """Returns a sentence about what a module keeps from call to call, if a new module agrees each time."""
    make, runs = subject.module, [c for c in calls if c.user and c.after is None]
    if (
        make is None
        or subject.states
        or any(_differ(subject, i, make(i), call) is not False for call in runs)
    ):
        return ""
    module = make(i)
    tensors, attributes = _with_copies(module), attributes_of(module)
    for call in runs:
        run_module(module, subject, call.inputs[i])
    now = _with_copies(module)
    changed = [n for n, (t, v) in now.items() if n not in tensors or _changed(tensors[n], (t, v))]
    changed += [d.path for d in differences(attributes, attributes_of(module)) if d.path not in changed]
    names = some(changed)
    what = f"leaves other values in {names}, which" if changed else "keeps something that"
    return (
        f"{subject.method} {what} the next call reads: a new module answers as the program does. To carry "
        "that from call to call, make it a buffer with register_buffer and build with "
        f"--state {changed[0] if changed and changed[0].split('.')[-1].isidentifier() else 'NAME'}"
    )


def answers_change(subject: Subject, calls: Sequence[VerifiedCall]) -> bool:
    """Returns whether the first member's module gives other answers to one call, run after run.

    Only a module with states may.
    """
    call = next((c for c in calls if c.user and c.after is None), None)
    if subject.module is None or subject.states or call is None:
        return False
    module, inputs = subject.module(0), call.inputs[0]

    def tensors() -> list[torch.Tensor]:
        return [x for x in run_module(module, subject, inputs) if isinstance(x, torch.Tensor)]

    first = tensors()
    return any(
        a.shape != b.shape or not torch.equal(a.nan_to_num(), b.nan_to_num())
        for _ in range(_REPEATS)
        for a, b in zip(first, tensors())
    )


def _with_copies(module: nn.Module) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Returns the tensors outside of parameters and buffers, each with a copy of its numbers."""
    return _copies(dict(tensors_of(module)))


def _changed(before: tuple[torch.Tensor, torch.Tensor], now: tuple[torch.Tensor, torch.Tensor]) -> bool:
    return before[0] is not now[0] or not torch.equal(before[1].nan_to_num(), now[1].nan_to_num())


def _with_weights(module: nn.Module, other: nn.Module) -> nn.Module:
    """Returns a module with the parameters and buffers of another one, as far as their shapes agree."""
    values = _weights(other)
    with torch.no_grad():
        for name, own in _weights(module).items():
            if name in values and values[name].shape == own.shape:
                copy_into(own.data, values[name])
    return module


def _differ(subject: Subject, i: int, module: nn.Module, call: VerifiedCall) -> bool | None:
    """Returns whether a module answers a call otherwise than the program with member i's weights.

    None: the difference is more than rounding explains, and too small to be sure; or one of them fails.
    """
    inputs = call.inputs[i]
    try:
        returned = run_module(module, subject, inputs)
        own = subject.answers(i, inputs)
    except Exception:  # noqa: BLE001  # whatever the user's code raises
        return None
    found: list[bool | None] = []
    for a, b in zip((x for x in returned if isinstance(x, torch.Tensor)), own):
        if a.shape != b.shape:
            return True
        if not b.is_floating_point():
            found.append(bool((a != b).any()))
            continue
        error = float((a.double() - b.double()).nan_to_num().abs().max()) if b.numel() else 0.0
        size = float(b.double().nan_to_num().abs().max()) if b.numel() else 0.0
        rounding = _ROUNDING * torch.finfo(b.dtype).eps
        found.append(True if error > _CLEAR * size else False if error <= rounding * size else None)
    return True if True in found else None if None in found else False


def why_unsteady(subject: Subject, i: int) -> str:
    """Returns why member i gives other answers from run to run, and the way out.

    A cause is named only if it is seen: a draw in the program, or a generator that a run of the module moves.
    """
    node = next(random_nodes(subject.program(i)), None)
    if node is not None:
        at = f" at {node.source}" if node.source else ""
        way = "Make" if without_randomness(subject.program(i)) is None else f"{_KEEP}; or make"
        return (
            f"it draws random numbers by {node.op.removesuffix('.default')}{at}. {way} forward "
            "deterministic, or make what it draws an input"
        )
    moved = _moved(subject, i)
    if moved:
        way = "Make what it draws an input" + ("" if "torch" in moved else ", or draw with torch")
        return (
            f"it draws from the generator of {' and '.join(moved)}, and its captured program does not. {way}"
        )
    return (
        "no random number of torch, Python's random or numpy.random is drawn, so it stores something between "
        "calls, or draws from a generator of its own. Make it deterministic, or make what changes an input"
    )


def _moved(subject: Subject, i: int) -> list[str]:
    """Returns the generators whose state a run of the member's module changes."""
    if subject.module is None:
        return []
    module = subject.module(i)
    (inputs,) = subject.draw(subject.sizes, 3, "shared", 1)
    before = generator_states()
    run_module(module, subject, inputs)
    return moved_since(before)


def moved_since(before: dict[str, Any]) -> list[str]:
    """Returns the generators whose state is another one now. before: what `generator_states` returned."""
    return [name for name, state in generator_states().items() if state != before.get(name)]


def generator_states() -> dict[str, Any]:
    """Returns the states of the generators that a member may draw from."""
    states: dict[str, Any] = {
        "Python's random": random.getstate(),
        "torch": bytes(torch.get_rng_state().numpy()),
    }
    if "numpy.random" in sys.modules:  # else no member can have used it
        kind, keys, *rest = sys.modules["numpy.random"].get_state()
        states["numpy.random"] = (kind, bytes(keys), *rest)
    return states
