"""One scheduler of torch for each member.

torch's schedulers compute with the options of an optimizer's groups. Here each member has a small optimizer
with its own options and no weights. After each step of the schedulers, the options of all members go back
into the groups of the optimizer that trains.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..errors import UsageError
from .member_wise import MemberWise, has_member_axis
from .rates import PerMember, plain_numbers


class _MemberOptions(torch.optim.Optimizer):
    """The options of one member's groups, as an optimizer that a scheduler of torch takes."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Does nothing: a scheduler expects a step of the optimizer before its own."""


class PerMemberScheduler:
    """A scheduler of torch for each member, over one optimizer of `widepack.optim`.

    Each member's learning rate changes as it would with its own scheduler: by its own metric
    (ReduceLROnPlateau), or with its own options (StepLR of other step sizes). Momentum and betas change too
    (OneCycleLR, CyclicLR). Groups that have a weight which all members share keep their options.

    Args:
        optimizer: An optimizer of `widepack.optim`.
        make: Returns the scheduler of a member. It is called once for each member, with an optimizer that has
            this member's options, and with the member's number.

    Attributes:
        optimizer: The optimizer.
        schedulers: The schedulers of the members.

    Raises:
        UsageError: The optimizer is not one of `widepack.optim`, or the number of members is not known from
            its groups.

    Example:
        >>> plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
        >>> scheduler = widepack.optim.PerMemberScheduler(optimizer, lambda o, i: plateau(o, patience=2))
        >>> scheduler.step(losses)  # N numbers
    """

    __module__ = "widepack.optim"  # pickles name the public place

    def __init__(self, optimizer: MemberWise, make: Callable[[torch.optim.Optimizer, int], Any]) -> None:
        if not isinstance(optimizer, MemberWise):
            raise UsageError(
                f"PerMemberScheduler: {type(optimizer).__module__}.{type(optimizer).__name__} has one rate "
                "for all members; use an optimizer of widepack.optim, for example widepack.optim.AdamW"
            )
        self.optimizer = optimizer
        self._count = _members(optimizer)
        if not self._groups():
            raise UsageError(
                "PerMemberScheduler: every group of the optimizer has a weight without a member axis; put "
                "the weights that all members share in a group with one rate"
            )
        self._options = [self._member_options(i) for i in range(self._count)]
        self.schedulers = [make(o, i) for i, o in enumerate(self._options)]
        self._write_back()

    def step(self, metrics: Any = None) -> None:
        """Performs one step of every member's scheduler. Call it after the optimizer's step.

        Args:
            metrics: What the schedulers take, for example the validation losses: N numbers, one for each
                member, or one number for all. Default: none.

        Raises:
            UsageError: There are not N numbers, the schedulers take none or need some, or the optimizer has
                another number of members.

        Example:
            >>> steps = torch.optim.lr_scheduler.StepLR
            >>> scheduler = widepack.optim.PerMemberScheduler(optimizer, lambda o, i: steps(o, 5 + i))
            >>> optimizer.step()
            >>> scheduler.step()
        """
        if not self._groups():
            raise UsageError(
                f"PerMemberScheduler: it has {self._count} members, and no group of the optimizer has as "
                "many. Give the scheduler to the call that removes members: "
                "fused.remove(i, optimizer=optimizer, scheduler=scheduler)"
            )
        values = self._metrics(metrics)
        self._check_arguments(values)
        for i, (options, scheduler) in enumerate(zip(self._options, self.schedulers)):
            self._read(options, i)
            options.step()
            scheduler.step(*values[i])
        self._write_back()

    def get_last_lr(self) -> list[Any]:
        """Returns the learning rates that the optimizer has now.

        Returns:
            The rate of each group: a number, or a `PerMember`.

        Example:
            >>> steps = torch.optim.lr_scheduler.StepLR
            >>> scheduler = widepack.optim.PerMemberScheduler(optimizer, lambda o, i: steps(o, 5 + i))
            >>> scheduler.get_last_lr()
            [0.1]
        """
        return [g["lr"] for g in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Returns the states of the members' schedulers.

        Returns:
            A dict that `torch.save` takes.

        Example:
            >>> steps = torch.optim.lr_scheduler.StepLR
            >>> scheduler = widepack.optim.PerMemberScheduler(optimizer, lambda o, i: steps(o, 5 + i))
            >>> torch.save(scheduler.state_dict(), "scheduler.pt")
        """
        return {"schedulers": [s.state_dict() for s in self.schedulers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the states of the members' schedulers. Load the optimizer's state too.

        Args:
            state_dict: What `state_dict` returned.

        Raises:
            UsageError: It is of another number of members, or no state of a `PerMemberScheduler`.

        Example:
            >>> steps = torch.optim.lr_scheduler.StepLR
            >>> scheduler = widepack.optim.PerMemberScheduler(optimizer, lambda o, i: steps(o, 5 + i))
            >>> scheduler.load_state_dict(scheduler.state_dict())
        """
        states = state_dict.get("schedulers") if isinstance(state_dict, Mapping) else None
        if not isinstance(states, list):
            raise UsageError(
                "PerMemberScheduler.load_state_dict: the state has no list 'schedulers'; give what its "
                "state_dict() returned"
            )
        if len(states) != self._count:
            raise UsageError(
                f"PerMemberScheduler: the state has schedulers of {len(states)} members, and the optimizer "
                f"has {self._count}"
            )
        for scheduler, state in zip(self.schedulers, states):
            scheduler.load_state_dict(state)

    def keep(self, members: Sequence[int]) -> None:
        """Keeps the schedulers of some members only. `Fused.remove` calls it.

        Args:
            members: The numbers of the members that stay, in order.

        Raises:
            UsageError: No such member exists, or none is given.

        Example:
            >>> steps = torch.optim.lr_scheduler.StepLR
            >>> scheduler = widepack.optim.PerMemberScheduler(optimizer, lambda o, i: steps(o, 5 + i))
            >>> removed = fused.remove(1, optimizer=optimizer, scheduler=scheduler)  # calls keep
        """
        if not members or not all(0 <= i < self._count for i in members):
            raise UsageError(
                f"PerMemberScheduler.keep: members are {list(members)}; give numbers from 0 to "
                f"{self._count - 1}"
            )
        self._options = [self._options[i] for i in members]
        self.schedulers = [self.schedulers[i] for i in members]
        self._count = len(self.schedulers)

    def _groups(self) -> list[dict[str, Any]]:
        """Returns the groups whose weights all have a member axis."""
        groups = self.optimizer.param_groups
        return [g for g in groups if all(has_member_axis(p, self._count) for p in g["params"])]

    def _scheduled(self, group: dict[str, Any]) -> list[str]:
        """Returns the names of a group's options that schedulers may change."""
        return [k for k in (*self.optimizer.member_options, *self.optimizer.pair_options) if k in group]

    def _member_options(self, i: int) -> _MemberOptions:
        """Returns member i's options as an optimizer."""
        groups = [
            {"params": [torch.zeros(1)], **{k: _of_member(g[k], i) for k in self._scheduled(g)}}
            for g in self._groups()
        ]
        return _MemberOptions(groups, {k: v for k, v in groups[0].items() if k != "params"})

    def _read(self, options: _MemberOptions, i: int) -> None:
        """Gives member i's options the values that the optimizer has now."""
        for group, member_group in zip(self._groups(), options.param_groups):
            member_group.update({k: _of_member(group[k], i) for k in self._scheduled(group)})

    def _write_back(self) -> None:
        """Gives the optimizer the options of all members."""
        for k, group in enumerate(self._groups()):
            of_members = [o.param_groups[k] for o in self._options]
            for name in dict.fromkeys((*self._scheduled(group), "initial_lr")):
                values = [g[name] for g in of_members if name in g]
                if len(values) == self._count:
                    group[name] = _together(values, group.get(name))

    def _check_arguments(self, values: Sequence[tuple[Any, ...]]) -> None:
        """Raises UsageError if a scheduler's step does not take what it would get. Nothing has changed."""
        for i, (scheduler, arguments) in enumerate(zip(self.schedulers, values)):
            try:
                inspect.signature(scheduler.step).bind(*arguments)
            except TypeError as e:
                needs = "takes no numbers" if arguments else "needs a number for each member"
                raise UsageError(
                    f"PerMemberScheduler.step: {type(scheduler).__name__} of member {i} {needs} ({e}); call "
                    f"scheduler.step({'' if arguments else 'losses'})"
                ) from e

    def _metrics(self, metrics: Any) -> list[tuple[Any, ...]]:
        """Returns the arguments of each scheduler's step. Raises UsageError."""
        if metrics is None:
            return [()] * self._count
        values = plain_numbers(metrics)
        if not isinstance(values, (Sequence, PerMember)) and not hasattr(values, "__len__"):
            return [(values,)] * self._count
        if len(values) != self._count:
            raise UsageError(
                f"PerMemberScheduler.step: there are {len(values)} numbers for {self._count} members; give "
                "one for each member"
            )
        return [(v,) for v in values]


def _members(optimizer: MemberWise) -> int:
    """Returns the number of members. Raises UsageError."""
    found = {
        len(v)
        for g in optimizer.param_groups
        for option in g.values()
        for v in (option if isinstance(option, tuple) else (option,))
        if isinstance(v, PerMember)
    } or {
        p.shape[0] if p.ndim else 0
        for g in optimizer.param_groups
        for p in g["params"]
        if has_member_axis(p, p.shape[0] if p.ndim else 0)
    }
    if len(found) != 1:
        raise UsageError(
            "PerMemberScheduler: the number of members is not known from the optimizer's parameters; give "
            "its lr one number for each member"
        )
    return found.pop()


def _of_member(option: Any, i: int) -> Any:
    """Returns member i's value of an option."""
    if isinstance(option, tuple):
        return tuple(_of_member(part, i) for part in option)
    return option[i] if isinstance(option, PerMember) else option


def _together(values: Sequence[Any], before: Any) -> Any:
    """Returns the members' values as one option: a number where one number was and all are equal."""
    if isinstance(values[0], tuple):
        parts = before if isinstance(before, tuple) else (None,) * len(values[0])
        return tuple(_together(part, b) for part, b in zip(zip(*values), parts))
    equal = all(v == values[0] for v in values)
    return values[0] if equal and not isinstance(before, PerMember) else PerMember(values)
