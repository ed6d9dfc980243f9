"""Stacks the weights of N live modules into one module: `[N, *shape]` each, under the member's own names.

The submodules mirror the member's submodules.

| weight | stored as |
|---|---|
| parameter | one nn.Parameter `[N, *shape]`, frozen where the members' is frozen |
| parameter named in `share`, or that is one object in all members | one nn.Parameter `[*shape]` |
| buffer that is one object in all members | one buffer `[*shape]` |
| buffer | a buffer `[N, *shape]`, saved where the members' is saved |
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from widepack_artifacts.errors import some
from widepack_artifacts.program import Kind

from ..checkpoints.differences import bit_equal
from ..errors import MemberMismatch, UsageError
from ..optim.rates import FROZEN, ONE_FOR_ALL
from .parts import stacked_part
from .skeleton import ModuleSkeleton, first_names, weights_of
from .torch_module import buffer_dict, parameter_dict, submodule_dict, unsaved_buffer_names

_MAX_NAMES = 20  # the most names that an error lists


@dataclass(frozen=True)
class StackedWeight:
    """Describes one weight of all members.

    Attributes:
        name: Its first name in the member.
        aliases: Its other names, if it is tied.
        kind: `stacked`, or `shared` for one value for all members.
        parameter: Whether it is a parameter. Otherwise it is a buffer.
        marks: The attributes of a parameter that all members have alike, such as `_no_weight_decay`: numbers,
            texts, and lists and dicts of them.
    """

    __module__ = "widepack"  # pickles name the public place

    name: str
    aliases: tuple[str, ...]
    kind: Kind
    parameter: bool
    marks: tuple[tuple[str, Any], ...] = ()


def plan_weights(
    models: Sequence[nn.Module], share: Sequence[str], all_shared: bool = False
) -> list[StackedWeight]:
    """Decides for each weight of matching members whether it is stacked or shared.

    Args:
        models: The members.
        share: Names of parameters, or patterns such as `trunk.*`, with one value for all members.
        all_shared: Whether all weights are shared, for N passes of one model.

    Raises:
        UsageError: A name in `share` is not a parameter.
        MemberMismatch: A parameter named in `share` has different values.
    """
    members = [weights_of(m) for m in models]
    weights = members[0]
    first = first_names(weights)
    parameters = {n for n, v in weights.items() if isinstance(v, nn.Parameter)}
    shared = _shared_names(share, weights, parameters)
    _check_equal_values(models, sorted(shared))
    shared |= _one_object(models)
    planned: dict[str, StackedWeight] = {}
    for name in weights:
        if first[name] == name:
            kind: Kind = "shared" if all_shared or name in shared else "stacked"
            marks = _common_marks([w[name] for w in members]) if name in parameters else ()
            planned[name] = StackedWeight(name, (), kind, name in parameters, marks)
        else:
            original = planned[first[name]]
            planned[first[name]] = replace(original, aliases=(*original.aliases, name))
    return list(planned.values())


def _common_marks(parameters: Sequence[torch.Tensor]) -> tuple[tuple[str, Any], ...]:
    """Returns the attributes that code outside reads, as far as they are plain and equal for all members."""
    first, *others = map(vars, parameters)
    return tuple(
        (name, value)
        for name, value in first.items()
        if name not in (ONE_FOR_ALL, FROZEN)
        and _is_plain(value)
        and all(name in o and _is_plain(o[name]) and o[name] == value for o in others)
    )


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple, dict)):
        items = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        return type(value) in (list, tuple, dict) and all(map(_is_plain, items))
    return type(value) in (bool, int, float, str, type(None))


def _shared_names(share: Sequence[str], weights: dict[str, torch.Tensor], parameters: set[str]) -> set[str]:
    """Returns the first names of the parameters that `share` names. Raises UsageError for a name of none."""
    first = first_names(weights)
    shared: set[str] = set()
    for pattern in share:
        matching = [n for n in weights if n in parameters and fnmatchcase(n, pattern)]
        if not matching:
            what = "a buffer, and each member has its own" if pattern in weights else "not a parameter"
            raise UsageError(
                f"share: {pattern} is {what}; the parameters are {some(sorted(parameters), _MAX_NAMES)}"
            )
        shared |= {first[n] for n in matching}
    return shared


def _one_object(models: Sequence[nn.Module]) -> set[str]:
    """Returns the first names of the weights that are one tensor in all members: those of a part that all
    members have. Raises MemberMismatch for a parameter that trains and that only some members have together.
    """
    if len(models) < 2:
        return set()
    weights = [weights_of(m) for m in models]
    first = first_names(weights[0])
    found: set[str] = set()
    for name in first.values():
        numbers: dict[int, list[int]] = {}
        for i, own in enumerate(weights):
            numbers.setdefault(id(own[name]), []).append(i)
        if len(numbers) == 1:
            found.add(name)
        elif len(numbers) < len(models) and weights[0][name].requires_grad:
            together = next(rows for rows in numbers.values() if len(rows) > 1)
            raise MemberMismatch(
                f"{name} is one parameter in members {', '.join(map(str, together))}, and another one in "
                "others. A fused module has one value for all members, or one for each: share the part "
                "among all, or give each member a copy of it (copy.deepcopy)"
            )
    return found


def _check_equal_values(models: Sequence[nn.Module], names: Sequence[str]) -> None:
    """Raises MemberMismatch for shared parameters whose values differ between members."""
    if not names:
        return
    own = weights_of(models[0])
    others = [weights_of(m) for m in models[1:]]
    different = [
        f"{name} in member {i}"
        for name in names
        for i, other in enumerate(others, 1)
        if not bit_equal(own[name].detach(), other[name].detach())
    ]
    if different:
        raise MemberMismatch(
            f"share: {len(different)} weights are not equal to member 0's: {some(different)}. A shared "
            "parameter has one value for all members; load the same values into all members first"
        )


def stack(root: nn.Module, models: Sequence[nn.Module], weights: Sequence[StackedWeight]) -> None:
    """Puts the members' weights under `root`, in submodules that mirror the first member's."""
    first = models[0]
    targets = _mirror_submodules(root, first)
    values = [weights_of(m) for m in models]
    for weight in weights:
        members = [v[weight.name].detach() for v in values]
        value = torch.stack(members) if weight.kind == "stacked" else members[0].clone()
        if weight.parameter:
            value = nn.Parameter(value, values[0][weight.name].requires_grad)
        for name in (weight.name, *weight.aliases):
            path, _, last = name.rpartition(".")
            source = first.get_submodule(path)
            target = targets[id(source)]
            tensors: dict[str, Any] = parameter_dict(target) if weight.parameter else buffer_dict(target)
            tensors[last] = value
            if not weight.parameter and last in unsaved_buffer_names(source):
                unsaved_buffer_names(target).add(last)
    for source in first.modules():  # a bias that is None in the member is None here too
        target = targets[id(source)]
        parameter_dict(target).update({n: None for n, v in parameter_dict(source).items() if v is None})
        buffer_dict(target).update({n: None for n, v in buffer_dict(source).items() if v is None})
    mark_parameters(root, weights, ())


def mark_parameters(root: nn.Module, weights: Sequence[StackedWeight], frozen: tuple[int, ...]) -> None:
    """Sets the attributes of parameters: the members' own, and those that `widepack.optim` reads.

    Args:
        root: The module that has the parameters.
        weights: The weights.
        frozen: The numbers of the members whose rows no step may change.
    """
    for weight in weights:
        if weight.parameter:
            tensors, last = slot_of(root, weight.name)
            vars(tensors[last]).update(copy.deepcopy(dict(weight.marks)))
            setattr(tensors[last], ONE_FOR_ALL, weight.kind == "shared")
            setattr(tensors[last], FROZEN, frozen if weight.kind == "stacked" else ())


def _mirror_submodules(root: nn.Module, model: nn.Module) -> dict[int, nn.Module]:
    """Adds a StackedModule to `root` for each submodule, and returns them by the submodule's id."""
    targets: dict[int, nn.Module] = {id(model): root}
    for path, module in model.named_modules(remove_duplicate=False):
        if path:
            target = targets.setdefault(id(module), stacked_part(module))
            parent, _, last = path.rpartition(".")
            submodule_dict(targets[id(model.get_submodule(parent))])[last] = target
    return targets


def slot_of(root: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """Returns the dict that has a weight, and the weight's name in it."""
    path, _, last = name.rpartition(".")
    part = root
    for key in path.split(".") if path else ():
        part = submodule_dict(part)[key]  # type: ignore[assignment]
    return (parameter_dict(part) if last in parameter_dict(part) else buffer_dict(part)), last


def member_module(
    root: nn.Module,
    skeleton: ModuleSkeleton,
    weights: Sequence[StackedWeight],
    i: int,
    device: torch.device | None = None,
) -> nn.Module:
    """Returns member i as a module of the user's own class, with copied weights, in the modes of the stacked
    modules.
    """
    slots = [(weight, *slot_of(root, weight.name)) for weight in weights]
    values = {w.name: tensors[n][i] if w.kind == "stacked" else tensors[n] for w, tensors, n in slots}
    member = skeleton.fill(values, device)
    own_parts = dict(member.named_modules())
    for path, part in root.named_modules():
        if path in own_parts:  # a module that the user added is none of the member's
            own_parts[path].training = part.training
    own = weights_of(member)
    for weight, tensors, name in slots:  # a parameter may have been frozen or unfrozen since the fuse
        if weight.parameter:
            own[weight.name].requires_grad_(tensors[name].requires_grad)
    return member
