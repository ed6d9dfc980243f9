"""`n=`: N members out of one module, or out of a factory.

A module is copied, and each of its parts draws its parameters again by its own `reset_parameters`, in the order of constructors: a part after all that it holds, so that
a container has the last word on its children (nn.MultiheadAttention zeroes the bias of its out_proj, nn.Transformer draws all matrices again).

What code outside of a `reset_parameters` does to weights (`nn.init.normal_(layer.weight, 0, 0.02)` in a model's own `__init__`) cannot be repeated from a live module. Where that is
seen, a warning names the parameters; a factory repeats everything.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from ..errors import UsageError
from .skeleton import Hollow, weights_of

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
    factory = "a factory instead of the module: fuse(lambda: Net(...), sample, n=...)"
    cannot = [
        f"{name or 'the module itself'} ({type(part).__name__}: {', '.join(n for n, p in part._parameters.items() if p is not None)})"
        for name, part in model.named_modules()
        if any(p is not None for p in part._parameters.values()) and _reset_of(part) is None
    ]
    if cannot:
        raise UsageError(
            f"n={n}: parts of {type(model).__name__} have parameters of their own and no reset_parameters() to draw them again: {'; '.join(cannot[:10])}{'; ...' if len(cannot) > 10 else ''}. "
            f"Give those classes one, or {factory}"
        )
    hollow, weights = Hollow(model), weights_of(model)
    made = []
    for _ in range(n):
        copy = hollow.filled(weights)
        for part in _children_first(copy, set()):
            reset = _reset_of(part)
            if reset is None:
                continue
            try:
                reset()
            except Exception as e:
                raise UsageError(f"n={n}: {type(part).__name__}.{reset.__name__}() failed ({type(e).__name__}: {e}). Give {factory}") from e
        made.append(copy)
    if unlike := _unlike(model, made[0]):
        warnings.warn(
            f"n={n}: the copies do not begin as {type(model).__name__}'s constructor makes it: {'; '.join(unlike[:10])}{'; ...' if len(unlike) > 10 else ''}. "
            f"What code outside of reset_parameters() does to weights is not repeated. For what the constructor does, give {factory}",
            stacklevel=4,
        )
    return made


def _children_first(part: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    """Every module once, after all that it holds."""
    seen.add(part)
    for child in part.children():
        if child not in seen:
            yield from _children_first(child, seen)
    yield part


def _unlike(model: nn.Module, copy: nn.Module) -> list[str]:
    """The parameters by which one can see that the model was initialised otherwise than its parts' resets do, in words.

    One number throughout is no draw, and nothing that training leaves. Of a tensor that two kinds of layers hold, the last reset wins, and which one won in the constructor cannot be seen.
    """
    fresh = dict(copy.named_parameters())
    found = [
        f"{name} is {float(p.flatten()[0]):.4g} throughout, and random in the copies"
        for name, p in model.named_parameters()
        if p.numel() > 1 and not p.is_meta and bool((p == p.flatten()[0]).all()) and not bool((fresh[name] == fresh[name].flatten()[0]).all())
    ]
    holders: dict[int, dict[str, str]] = {}
    for path, part in model.named_modules():
        for name, p in part._parameters.items():
            if p is not None:
                holders.setdefault(id(p), {})[f"{path}.{name}".lstrip(".")] = type(part).__name__
    return found + [
        f"{' and '.join(held)} are one tensor, drawn in the copies as {list(held.values())[-1]} does"
        for held in holders.values()
        if len(set(held.values())) > 1
    ]


def _reset_of(part: nn.Module) -> Callable[[], Any] | None:
    return next((getattr(part, name) for name in _RESETS if callable(getattr(part, name, None))), None)
