"""`n=`: N members out of one module, or out of a factory.

A module is copied, and each of its parts that has parameters of its own draws them again, as its constructor did (`reset_parameters`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from .errors import UsageError
from .hollow import Hollow, weights_of

_RESETS = ("reset_parameters", "_reset_parameters")


def members_of(models: Any, n: int | None, same: bool) -> list[nn.Module]:
    """The members that `fuse` was given. same: N times one module, weights and all, instead of fresh copies. Raises: UsageError."""
    if n is None:
        if isinstance(models, nn.Module) and not isinstance(models, nn.ModuleList):
            raise UsageError("models is one module; give a list of members, or n=8 for 8 copies with fresh initialisation")
        members = list(models) if isinstance(models, (Sequence, nn.ModuleList)) else []
        if not members or not all(isinstance(m, nn.Module) for m in members):
            raise UsageError("models is no list of modules; fuse takes N live modules of one architecture, and widepack.build checkpoints")
        return members
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise UsageError(f"n is {n!r}; it is how many members there shall be")
    if isinstance(models, nn.Module):
        return [models] * n if same else fresh_copies(models, n)
    if isinstance(models, Sequence) or not callable(models):
        raise UsageError("n is given with a list of members; n takes one module, or a factory that makes one")
    made = [_made(models) for _ in range(n)]
    if len(set(map(id, made))) < n:
        raise UsageError("the factory returned one module twice; it makes a fresh one at every call")
    return made


def _made(factory: Callable[[], Any]) -> nn.Module:
    found = factory()
    if not isinstance(found, nn.Module):
        raise UsageError(f"the factory returned {found!r:.60}; a factory returns a torch.nn.Module")
    return found


def fresh_copies(model: nn.Module, n: int) -> list[nn.Module]:
    """N copies, each with parameters that it drew itself. Raises: UsageError naming the parts that cannot."""
    cannot = [
        f"{name or 'the module itself'} ({type(part).__name__}: {', '.join(n for n, p in part._parameters.items() if p is not None)})"
        for name, part in model.named_modules()
        if any(p is not None for p in part._parameters.values()) and _reset_of(part) is None
    ]
    if cannot:
        raise UsageError(
            f"n={n}: parts of {type(model).__name__} have parameters of their own and no reset_parameters() to draw them again: {'; '.join(cannot[:10])}{'; ...' if len(cannot) > 10 else ''}. "
            "Give those classes one, or a factory instead of the module: fuse(lambda: Net(...), sample, n=...)"
        )
    hollow, weights = Hollow(model), weights_of(model)
    made = []
    for _ in range(n):
        copy = hollow.filled(weights)
        for part in copy.modules():
            reset = _reset_of(part) if part._parameters else None
            if reset is not None:
                reset()
        made.append(copy)
    return made


def _reset_of(part: nn.Module) -> Callable[[], Any] | None:
    return next((getattr(part, name) for name in _RESETS if callable(getattr(part, name, None))), None)
