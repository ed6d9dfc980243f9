"""Finds why a member's own module answers otherwise than the captured program. Each cause is shown by a run.

| shown by | cause |
|---|---|
| a new module that answers as the program does | it keeps something between calls; what changed is named |
| the member that was captured differs too | no difference of members: the program differs from its module |
| the captured member without attributes of its parameters agrees | torch.export does not see them |
| it agrees while `torch.compiler.is_compiling()` is True | its code does something else then |
| this module with the captured member's weights | members differ in something that is not a weight |
| this module agrees with the program then | the program holds for the values of some weights only |

Where a run does not decide, no cause is named.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..capture.attributes import attributes_of, differences
from ..capture.reachable import tensors_of
from ..ir.overlapping import copy_into
from ..ir.torch_internals import as_if_exported
from .module_run import run_module
from .subject import Subject, VerifiedCall

_CLEAR = 1e-3  # a difference of this part of an answer is no rounding
_ROUNDING = 64  # ulp: a difference of less is rounding
_REPEATS = 8  # of one call: a coin may fall the same way a few times
_REPORT = "Please report it, with the member's code"


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
        why = _read_otherwise(subject, first, runs) or _REPORT
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
    tensors, attributes = _tensors(module), attributes_of(module)
    for call in runs:
        run_module(module, subject, call.inputs[i])
    now = _tensors(module)
    changed = [n for n, (t, v) in now.items() if n not in tensors or _changed(tensors[n], (t, v))]
    changed += [d.path for d in differences(attributes, attributes_of(module)) if d.path not in changed]
    names = ", ".join(changed[:5])
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


def _tensors(module: nn.Module) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Returns the tensors outside of parameters and buffers, each with a copy of its numbers."""
    return {n: (t, t.detach().clone()) for n, t in tensors_of(module)}


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
