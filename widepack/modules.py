"""N live modules of one class, side by side: what differs between them, their tensors stacked, and N modules again.

A *pattern* is a copy of the first module whose tensors have no memory: it keeps the options, and is copied to give modules back.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .attributes import attributes_of
from .errors import MemberMismatch, UsageError

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def facts(module: nn.Module) -> dict[str, str]:
    """All in which members must agree, as text: class, tensors with shape, dtype, device and whether they train, plain attributes, modes."""
    found = {"class": type(module).__name__}
    for kind, tensors in (("parameter", module.named_parameters(remove_duplicate=False)), ("buffer", module.named_buffers(remove_duplicate=False))):
        for name, t in tensors:
            trains = "" if kind == "buffer" else ", trains" if t.requires_grad else ", frozen"
            found[f"{kind} {name}"] = f"{str(t.dtype)[6:]}{list(t.shape)} on {t.device}{trains}"
    found |= attributes_of(module)
    for name, part in module.named_modules():
        found[f"mode of {name}" if name else "mode"] = "train" if part.training else "eval"
    return found


def refuse_differences(modules: Sequence[nn.Module], who: str) -> None:
    """Refuse members that differ in more than their numbers. Raises: MemberMismatch with all differences, numbered."""
    each = [facts(m) for m in modules]
    rows = []
    for key in dict.fromkeys(k for f in each for k in f):
        by_value: dict[str, list[int]] = {}
        for i, f in enumerate(each):
            by_value.setdefault(f.get(key, "none"), []).append(i)
        if len(by_value) > 1:
            rows.append(f"{key} is " + ", ".join(f"{value} in {_members(at)}" for value, at in by_value.items()))
    if rows:
        numbered = "; ".join(f"({i}) {row}" for i, row in enumerate(rows, 1))
        raise MemberMismatch(
            f"{who}: the members differ in more than the numbers of their parameters and buffers: {numbered}. Give modules that agree in these, or apart"
        )


def _members(at: Sequence[int]) -> str:
    few = ", ".join(map(str, at[:4])) + (f" and {len(at) - 4} more" if len(at) > 4 else "")
    return f"member{'s' if len(at) > 1 else ''} {few}"


def refuse_hooks(modules: Sequence[nn.Module], who: str) -> None:
    """Refuse hooks, which a wide layer would not call. Raises: UsageError."""
    for i, module in enumerate(modules):
        for name, part in module.named_modules():
            if any(getattr(part, hooks) for hooks in _HOOKS):
                at = f"its {name}" if name else "it"
                raise UsageError(
                    f"{who}: {at} of member {i} has hooks, which nobody would call here; remove them (weight_norm of torch.nn.utils is one)"
                )


def hold(into: nn.Module, parts: Sequence[nn.Module]) -> None:
    """Give `into` the parts' parameters and buffers, stacked to `[N, ...]`, under their names; those of submodules in plain modules of their names."""
    first = parts[0]
    into.training = first.training
    for name, p in first._parameters.items():
        own = [part._parameters[name] for part in parts]
        held = None if p is None else nn.Parameter(torch.stack([t.detach() for t in own if t is not None]), p.requires_grad)
        into.register_parameter(name, held)
    for name, b in first._buffers.items():
        tensors = [part._buffers[name] for part in parts]
        stacked = None if b is None else torch.stack([t.detach() for t in tensors if t is not None])
        into.register_buffer(name, stacked, persistent=name not in first._non_persistent_buffers_set)
    for name, child in first.named_children():
        inner = nn.Module()
        into.add_module(name, inner)
        hold(inner, [part.get_submodule(name) for part in parts])
        inner.training = child.training


def pattern_of(module: nn.Module) -> nn.Module:
    """A copy without memory."""
    empty: dict[int, Tensor] = {}
    for t in (*module.parameters(), *module.buffers()):
        meta = torch.empty_like(t, device="meta")
        empty[id(t)] = nn.Parameter(meta, t.requires_grad) if isinstance(t, nn.Parameter) else meta
    return copy.deepcopy(module, dict(empty))


def apart(held: nn.Module, pattern: nn.Module, count: int) -> list[nn.Module]:
    """N modules again: copies of the pattern with the numbers, modes and requires_grad of what `held` has."""
    made = []
    for i in range(count):
        own: dict[int, Tensor] = {}
        for name, p in pattern.named_parameters(remove_duplicate=False):
            given = held.get_parameter(name)
            own[id(p)] = nn.Parameter(given.detach()[i].clone(), given.requires_grad)
        for name, b in pattern.named_buffers(remove_duplicate=False):
            own[id(b)] = held.get_buffer(name).detach()[i].clone()
        module = copy.deepcopy(pattern, dict(own))
        for name, part in module.named_modules():
            part.training = held.get_submodule(name).training
        made.append(module)
    return made
