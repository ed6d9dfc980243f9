"""Removes members from optimizers and schedulers: their rows of states, and their numbers of options."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import UsageError
from .rates import PerMember
from .schedulers import PerMemberScheduler

REMOVED = "widepack_members_removed"
"""The attribute of parameters from which members were removed."""


def optimizers_of(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None, schedulers: Sequence[Any]
) -> list[torch.optim.Optimizer]:
    """Returns the optimizers of a removal: those that the user gave, and those of the schedulers.

    Raises:
        UsageError: A value is not an optimizer.
    """
    given: list[Any] = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    given = [o for o in given if o is not None]
    for value in given:
        if not isinstance(value, torch.optim.Optimizer):
            raise UsageError(
                f"remove: optimizer is {type(value).__name__}; give an optimizer of widepack.optim or "
                "torch.optim, or a list of them"
            )
    given += [s.optimizer for s in schedulers]
    return list({id(o): o for o in given}.values())


def schedulers_of(scheduler: Any) -> list[Any]:
    """Returns the schedulers of a removal as a list. Raises UsageError for a value that is not one."""
    given = list(scheduler) if isinstance(scheduler, (list, tuple)) else [scheduler]
    given = [s for s in given if s is not None]
    for value in given:
        if not isinstance(getattr(value, "optimizer", None), torch.optim.Optimizer):
            raise UsageError(
                f"remove: scheduler is {type(value).__name__}; give a PerMemberScheduler or a scheduler of "
                "torch.optim.lr_scheduler, or a list of them"
            )
    return list({id(s): s for s in given}.values())


def check_optimizer(optimizer: torch.optim.Optimizer, parameters: Collection[Tensor], count: int) -> None:
    """Checks that members can be removed from an optimizer. Nothing changes.

    Args:
        optimizer: The optimizer.
        parameters: The parameters `[N, ...]` of the module.
        count: The number of members, N.

    Raises:
        UsageError: An option or a state cannot be separated by members, or the optimizer has no parameter of
            the module.
    """
    who, own = type(optimizer).__name__, set(map(id, parameters))
    if own.isdisjoint(id(p) for group in optimizer.param_groups for p in group["params"]):
        raise UsageError(
            f"remove: {who} has no parameter of this fused module; give the optimizer that was made of "
            "fused.parameters()"
        )
    for group in optimizer.param_groups:
        foreign = [p for p in group["params"] if id(p) not in own]
        if len(foreign) == len(group["params"]):
            if any(len(v) == count for option in group.values() for v in _per_member(option)):
                raise UsageError(
                    f"remove: {who} has another group with {count} numbers for {count} members, which may be "
                    "those of another fused module; give each fused module an optimizer of its own"
                )
            continue
        for key, length in ((k, len(v)) for k, option in group.items() for v in _per_member(option)):
            if length != count or foreign:
                what = f"has {length} numbers" if length != count else "is for other parameters too"
                raise UsageError(
                    f"remove: {key} of {who} {what}, and the fused module has {count} members; give the "
                    "optimizer of this module, with parameters of other modules in groups of their own"
                )
        for p in group["params"]:
            for name, value in optimizer.state.get(p, {}).items() if id(p) in own else ():
                if not _is_number(value) and not _has_rows(optimizer, name, value, p):
                    raise UsageError(
                        f"remove: the state {name} of {who} cannot be separated by members: the parameter "
                        f"is {list(p.shape)}, the state is {_form(value)}. Use an optimizer that works "
                        "number by number, such as widepack.optim.AdamW, or make a new one after remove"
                    )


def check_scheduler(scheduler: Any, count: int) -> None:
    """Raises UsageError if a PerMemberScheduler has another number of members."""
    if isinstance(scheduler, PerMemberScheduler) and len(scheduler.schedulers) != count:
        raise UsageError(
            f"remove: the PerMemberScheduler has {len(scheduler.schedulers)} members, and the fused module "
            f"has {count}; give the scheduler of this module's optimizer"
        )


def remove_from_optimizer(
    optimizer: torch.optim.Optimizer, parameters: Collection[Tensor], count: int, kept: Sequence[int]
) -> None:
    """Keeps the given members of an optimizer, which `check_optimizer` has checked.

    Args:
        optimizer: The optimizer.
        parameters: The parameters of the module, before their rows are removed.
        count: The number of members, N.
        kept: The numbers of the members that stay.
    """
    own = set(map(id, parameters))
    for group in optimizer.param_groups:
        if own.isdisjoint(map(id, group["params"])):
            continue
        group.update(
            {k: _kept(v, count, kept) for k, v in group.items() if k not in ("params", "param_names")}
        )
        for p in group["params"]:
            if id(p) in own and p in optimizer.state:
                state = optimizer.state[p]
                state.update({k: v[list(kept)] for k, v in state.items() if _has_rows(optimizer, k, v, p)})
    optimizer.defaults.update({k: _kept(v, count, kept) for k, v in optimizer.defaults.items()})


def remove_from_scheduler(scheduler: Any, count: int, kept: Sequence[int]) -> None:
    """Keeps the given members of a scheduler. A scheduler of torch may have rates of N members."""
    if isinstance(scheduler, PerMemberScheduler):
        scheduler.keep(kept)
        return
    state = scheduler.state_dict()
    if any(True for _ in _per_member(state)):
        scheduler.load_state_dict(_kept(state, count, kept))


def mark_removed(parameters: Iterable[Tensor]) -> None:
    """Marks parameters that have lost rows. From now on, steps of optimizers that still have them fail."""
    for p in parameters:
        setattr(p, REMOVED, True)
    _refuse_steps_with_other_rows()


def _per_member(option: Any) -> Iterable[PerMember]:
    """Yields the `PerMember` values in an option or a state."""
    if isinstance(option, PerMember):
        yield option
    elif isinstance(option, (list, tuple)):
        for part in option:
            yield from _per_member(part)
    elif isinstance(option, Mapping):
        for part in option.values():
            yield from _per_member(part)


def _kept(option: Any, count: int, kept: Sequence[int]) -> Any:
    """Returns an option or a state in which each `PerMember` of N numbers has only those of some members."""
    if isinstance(option, PerMember):
        return PerMember(option[i] for i in kept) if len(option) == count else option
    if type(option) in (list, tuple):
        return type(option)(_kept(part, count, kept) for part in option)
    return {k: _kept(v, count, kept) for k, v in option.items()} if type(option) is dict else option


def _is_number(value: Any) -> bool:
    """Whether a state is one number for all members, or nothing."""
    return value is None or isinstance(value, (int, float)) or (isinstance(value, Tensor) and not value.ndim)


def _has_rows(optimizer: torch.optim.Optimizer, name: str, value: Any, p: Tensor) -> bool:
    """Whether axis 0 of a parameter's state is the member axis."""
    if not isinstance(value, Tensor) or not value.ndim:
        return False
    of_steps = name in getattr(optimizer, "step_states", ())
    return value.shape == p.shape or (of_steps and value.shape == p.shape[:1])


def _form(value: Any) -> str:
    return str(list(value.shape)) if isinstance(value, Tensor) else f"a {type(value).__name__}"


_hooks: list[Any] = []


def _refuse_steps_with_other_rows() -> None:
    """Registers the check of optimizers before their steps, once."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_check_rows))


def _check_rows(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raises UsageError before a step if the optimizer has rows or options of removed members."""
    for group in optimizer.param_groups:
        own = [p for p in group["params"] if getattr(p, REMOVED, False)]
        if not own:
            continue
        members = own[0].shape[0]
        found = [
            f"{k} has {len(v)} numbers" for k, o in group.items() for v in _per_member(o) if len(v) != members
        ]
        found += [
            f"the state {k} is {list(v.shape)}"
            for p in own
            for k, v in optimizer.state.get(p, {}).items()
            if isinstance(v, Tensor) and v.ndim == p.ndim and v.shape[1:] == p.shape[1:] and len(v) != members
        ]
        if found:
            raise UsageError(
                f"{type(optimizer).__name__}: {found[0]}, and {members} members are left in the fused "
                "module. Give the optimizer and its scheduler to the call that removes members: "
                "fused.remove(i, optimizer=optimizer, scheduler=scheduler); or make a new optimizer"
            )
