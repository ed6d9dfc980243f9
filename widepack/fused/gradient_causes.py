"""Explains a wrong gradient: what a member's forward does to gradients that a capture does not contain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from widepack_artifacts.program import Program

from .gradient_differences import WAY_OUT
from .gradients import Gradients, error_and_size, relative_bound
from .member_runs import LiveMembers, run_module, run_program
from .programs import FusedEntry

_FUNCTION = (
    "the backward of {}, a torch.autograd.Function: write it in ops of torch, for example "
    "x + (x.round() - x).detach() for a gradient that passes a rounding"
)
_HOOK = (
    "a hook of gradients ({}): change the gradients after backward, or write a * x + ((1 - a) * x).detach()"
)
_DETACH = "{} in place: write y = y.detach()"
_CALLS = {
    "register_hook": _HOOK,
    "register_post_accumulate_grad_hook": _HOOK,
    "detach_": _DETACH,
}


class _Calls(TorchFunctionMode):
    """Records which methods of `_CALLS` are called."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _CALLS:
            self.found[name] = _CALLS[name].format(name)
        return func(*args, **(kwargs or {}))


def way_out(
    fused: LiveMembers,
    entry: FusedEntry,
    program: Program,
    i: int,
    leaves: Sequence[Tensor],
    names: Sequence[str],
) -> str:
    """Returns what to do about a gradient of member i that differs from its module's.

    Args:
        fused: The fused module.
        entry: The entry of the program.
        program: The captured program, at rest.
        i: The member.
        leaves: The inputs.
        names: The weights whose gradients are computed.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            with _Calls() as calls:
                outputs, own = run_module(fused, i, leaves, names)
            torch.manual_seed(0)
            _, captured = run_program(fused, entry, program, i, leaves, names)
    except (RuntimeError, ValueError, IndexError, TypeError):
        return WAY_OUT
    if _agree(captured, own):
        return WAY_OUT
    found = [*_functions(outputs), *calls.found.values()]
    same = 'strategy="loop" gives the same gradient, because the captured program has it'
    skip = "validate=False skips this check and trains with the derivatives of forward's ops"
    if found:
        return f"A capture does not contain {'; nor '.join(found)}. {same}; {skip}"
    return f"The capture may have lost a detach or no_grad. Please report it; {same}; {skip}"


def _agree(captured: Gradients, own: Gradients) -> bool:
    """Returns whether the gradients of the captured program are the module's, up to rounding."""
    bound = relative_bound([g for g in own.values() if g is not None])
    for name, expected in own.items():
        computed = captured.get(name)
        if (computed is None) != (expected is None):
            return False
        if computed is not None and expected is not None:
            error, size = error_and_size(computed, expected)
            if error > bound * size + torch.finfo(expected.dtype).tiny:
                return False
    return True


def _functions(outputs: Sequence[Tensor]) -> list[str]:
    """Returns in words the classes with a backward in Python that made these values, each once."""
    found: dict[str, None] = {}
    left, seen = [y.grad_fn for y in outputs], set()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        left += [before for before, _ in node.next_functions]
        of_class = getattr(type(node), "_forward_cls", None)
        if of_class is None:
            continue
        module = str(of_class.__module__)
        if not module.startswith("torch."):
            found[_FUNCTION.format(of_class.__name__)] = None
        elif module.startswith("torch.nn.modules._functions") and "Hook" in of_class.__name__:
            found[_HOOK.format("register_full_backward_hook")] = None
    return list(found)
