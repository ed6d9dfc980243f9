"""Makes N members out of one module or out of a factory, for `fuse(..., n=N)`.

A module is copied. Each of its parts draws its parameters again with its own `reset_parameters`, in the order
of constructors: a part after its children. So a container overrides its children (nn.MultiheadAttention sets
the bias of its out_proj to zero, nn.Transformer draws all matrices again).

Code outside of `reset_parameters` that initializes weights (`nn.init.normal_(layer.weight, 0, 0.02)` in a
model's `__init__`) cannot be repeated from a live module. If the copies show a difference, a warning names
the parameters. A factory repeats everything.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from widepack_artifacts.errors import some

from ..errors import UsageError
from ..inference.loaded_model import LoadedModel
from ..inference.members.member import Member
from .skeleton import ModuleSkeleton, weights_of
from .torch_module import parameter_dict

_RESETS = ("reset_parameters", "_reset_parameters")
_NOT_MODULES = (
    "which is a program that does not train; make modules of your model's class, load ens.state_dict(i) into "
    "each of them, and fuse these"
)
_MAX_ROWS = 10  # the most parts or parameters that a message lists


def members_of(models: Any, n: int | None, same: bool) -> list[nn.Module]:
    """Returns the members that the user gave to `fuse`.

    With `same` they are N times one module with its weights, instead of fresh copies. Raises UsageError.
    """
    if n is None:
        if isinstance(models, nn.Module) and not isinstance(models, nn.ModuleList):
            raise UsageError(
                "models is one module; give a list of members, or n=8 for 8 copies with fresh initialization"
            )
        if isinstance(models, LoadedModel):
            raise UsageError(f"models is a loaded artifact of {len(models)} members, {_NOT_MODULES}")
        members = list(models) if isinstance(models, (Sequence, nn.ModuleList)) else []
        if not members and isinstance(models, (Sequence, nn.ModuleList)):
            raise UsageError("models is an empty list; give at least one module")
        if not members or not all(isinstance(m, nn.Module) for m in members):
            raise UsageError(
                "models is not a list of modules. fuse takes N live modules of one architecture, or a "
                "factory and their number, such as n=8; widepack.build takes checkpoints"
            )
        _refuse_loaded_members(members)
        return members
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise UsageError(f"n is {n!r}; give the number of members, at least 1")
    if isinstance(models, nn.Module):
        _refuse_loaded_members([models])
        return [models] * n if same else fresh_copies(models, n)
    if isinstance(models, Sequence) or not callable(models):
        raise UsageError("n is given with a list of members; n takes one module, or a factory that makes one")
    members = [_call_factory(models) for _ in range(n)]
    if len(set(map(id, members))) < n:
        raise UsageError(
            "the factory returned one module twice; a factory must make a new module at every call"
        )
    return members


def _refuse_loaded_members(members: Sequence[nn.Module]) -> None:
    """Raises UsageError for a member of a loaded artifact: it is a program, and its weights do not train."""
    for i, member in enumerate(members):
        if isinstance(member, Member):
            raise UsageError(f"models[{i}] is member {member.name} of a loaded artifact, {_NOT_MODULES}")


def _call_factory(factory: Callable[[], Any]) -> nn.Module:
    module = factory()
    if not isinstance(module, nn.Module):
        raise UsageError(f"the factory returned {module!r:.60}; a factory must return a torch.nn.Module")
    return module


def fresh_copies(model: nn.Module, n: int) -> list[nn.Module]:
    """Returns N copies with fresh parameters. Raises UsageError that names parts without a reset."""
    factory = "a factory instead of the module: fuse(lambda: Net(...), sample, n=...)"
    _refuse_parts_without_reset(model, n, factory)
    skeleton, weights = ModuleSkeleton(model), weights_of(model)
    copies = []
    for _ in range(n):
        copy = skeleton.fill(weights)
        for part in _children_first(copy, set()):
            reset = _reset_of(part)
            if reset is None:
                continue
            try:
                reset()
            except Exception as e:
                raise UsageError(
                    f"n={n}: {type(part).__name__}.{reset.__name__}() failed ({type(e).__name__}: "
                    f"{e}). Give {factory}"
                ) from e
        copies.append(copy)
    if differences := _visible_differences(model, copies[0]):
        warnings.warn(
            f"n={n}: the copies differ from what the constructor of {type(model).__name__} makes: "
            f"{some(differences, _MAX_ROWS, '; ')}. Initialization outside of reset_parameters() is not "
            f"repeated. To repeat what the constructor does, give {factory}",
            stacklevel=4,
        )
    return copies


def _refuse_parts_without_reset(model: nn.Module, n: int, factory: str) -> None:
    """Raises UsageError for parts that have parameters and no `reset_parameters`."""
    parts = []
    for name, part in model.named_modules():
        own = [key for key, p in parameter_dict(part).items() if p is not None]
        if own and _reset_of(part) is None:
            parts.append(f"{name or 'the module itself'} ({type(part).__name__}: {', '.join(own)})")
    if parts:
        raise UsageError(
            f"n={n}: parts of {type(model).__name__} have parameters, but no reset_parameters() to "
            f"initialize them again: {some(parts, _MAX_ROWS, '; ')}. Give those classes one, or {factory}"
        )


def _children_first(part: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    """Yields every module once, each after its children."""
    seen.add(part)
    for child in part.children():
        if child not in seen:
            yield from _children_first(child, seen)
    yield part


def _visible_differences(model: nn.Module, copy: nn.Module) -> list[str]:
    """Returns, in words, the parameters that show that the model was initialized in another way than the
    copy.

    A parameter with one number throughout was neither drawn nor trained. A tensor that two kinds of layers
    share gets the values of the last reset, and the constructor may have had another order.
    """
    fresh = dict(copy.named_parameters())
    words = [
        f"{name} is {float(p.flatten()[0]):.4g} throughout, and random in the copies"
        for name, p in model.named_parameters()
        if p.numel() > 1
        and not p.is_meta
        and bool((p == p.flatten()[0]).all())
        and not bool((fresh[name] == fresh[name].flatten()[0]).all())
    ]
    owners: dict[int, dict[str, str]] = {}  # by tensor: each name, and the class of its module
    for path, part in model.named_modules():
        for name, p in parameter_dict(part).items():
            if p is not None:
                owners.setdefault(id(p), {})[f"{path}.{name}".lstrip(".")] = type(part).__name__
    return words + [
        f"{' and '.join(classes)} are one tensor, drawn in the copies as {list(classes.values())[-1]} does"
        for classes in owners.values()
        if len(set(classes.values())) > 1
    ]


def _reset_of(part: nn.Module) -> Callable[[], Any] | None:
    """Returns the method of a part that draws its parameters again."""
    return next((getattr(part, name) for name in _RESETS if callable(getattr(part, name, None))), None)
