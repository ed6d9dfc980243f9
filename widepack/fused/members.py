"""Defines the part of `Fused` that is about single members: modules, copies, frozen members."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..checkpoints.differences import bit_equal
from ..errors import UsageError
from .programs import FusedEntry
from .recipe import FusedRecipe
from .stacked_parameters import mark_parameters, member_module, slot_of

if TYPE_CHECKING:
    from typing_extensions import Self


class FusedMembers(nn.Module):
    """The members of a fused module, one at a time. `Fused` is one."""

    _recipe: FusedRecipe
    _entries: dict[Any, FusedEntry]  # by modes, dtypes and device
    _slots: dict[str, tuple[dict[str, Any], str]]  # of the weights, by name
    _frozen: tuple[int, ...] = ()  # the numbers of the frozen members

    def __len__(self) -> int:
        return len(self._recipe.skeletons)

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[nn.Module]:
        return (self.member(i) for i in range(len(self)))

    def tensor_of(self, name: str) -> torch.Tensor:
        """Returns a parameter or buffer by the members' name.

        Args:
            name: The name in the member's `state_dict`, for example `"layers.0.weight"`.

        Returns:
            The tensor `[N, *shape]`, or `[*shape]` if it is shared. It is not a copy.

        Raises:
            KeyError: The members have no such parameter or buffer.
        """
        if name not in self._slots:
            self._slots[name] = slot_of(self, name)
        tensors, last = self._slots[name]
        value: torch.Tensor = tensors[last]
        return value

    def member(self, i: int, device: torch.device | str | None = None) -> nn.Module:
        """Returns a copy of member i as a module of the original class, in the fused module's mode.

        Args:
            i: The member's number from 0. Negative numbers count from the end.
            device: The device of the copy. Default: the fused module's device.

        Returns:
            The member with the weights and buffers that it has now.

        Raises:
            UsageError: No such member exists.

        Example:
            >>> torch.save(fused.member(0).state_dict(), "member0.pt")
        """
        recipe, i = self._recipe, self._number(i)
        target = None if device is None else torch.device(device)
        return member_module(self, recipe.skeletons[i], recipe.weights, i, target)

    def _number(self, i: int) -> int:
        """Returns a member's number from 0. Raises UsageError."""
        if not isinstance(i, int) or not -len(self) <= i < len(self):
            raise UsageError(f"there is no member {i!r}; there are {len(self)}, counted from 0")
        return i % len(self)

    def unfuse(self) -> list[nn.Module]:
        """Returns the members as N modules of the original class.

        Returns:
            N copies, with weights and buffers as they are now, bit for bit. They share nothing with the fused
            module.

        Example:
            >>> models = fused.unfuse()
        """
        return [self.member(i) for i in range(len(self))]

    def copy_(self, to: int, source: int) -> Self:
        """Overwrites one member's parameters and buffers with another's, in place.

        The state of an optimizer for member `to` does not change.

        Args:
            to: The number of the member that is overwritten.
            source: The number of the member that is copied.

        Returns:
            The fused module itself.

        Raises:
            UsageError: No such member exists, or the two differ in plain attributes, which are not copied.

        Example:
            >>> fused.copy_(2, 0)  # member 2 continues from member 0
        """
        to, source = self._number(to), self._number(source)
        different = [
            n
            for e in self._entries.values()
            for n, v in e.constants.items()
            if e.kinds[n] == "stacked" and not bit_equal(v[to], v[source])
        ]
        if different:
            raise UsageError(
                f"members {to} and {source} differ in {', '.join(dict.fromkeys(different))}, plain "
                "attributes, which copy_ does not copy; make them buffers"
            )
        with torch.no_grad():
            for weight in self._recipe.weights:
                if weight.kind == "stacked":
                    value = self.tensor_of(weight.name)
                    value[to].copy_(value[source])
        return self

    # ---------------------------------------------------------------- frozen members

    @property
    def frozen_members(self) -> tuple[int, ...]:
        """The numbers of the members that `freeze` has frozen."""
        return self._frozen

    def freeze(self, *members: int) -> Self:
        """Stops the training of members, while the others train on.

        In train mode a frozen member's buffers (the statistics of a BatchNorm) keep their values. Its own
        parameters get gradients of zero, and the optimizers of `widepack.optim` change neither them nor their
        states. It still answers, and gradients of inputs and of shared weights still flow through it. torch's
        optimizers do not know of it: their momentum and weight decay move weights whose gradient is zero.

        Args:
            *members: The numbers of the members.

        Returns:
            The fused module itself.

        Raises:
            UsageError: No such member exists, or all members are passes of one model.

        Example:
            >>> fused.freeze(2)  # member 2 has converged
        """
        if self._recipe.one_model:
            raise UsageError(
                "the members are passes of one model, with one set of weights: none can be frozen"
            )
        self._set_frozen({*self._frozen, *(self._number(i) for i in members)})
        return self

    def unfreeze(self, *members: int) -> Self:
        """Lets frozen members train again.

        Args:
            *members: The numbers of the members. Default: all.

        Returns:
            The fused module itself.

        Raises:
            UsageError: No such member exists.
        """
        numbers = {self._number(i) for i in members} if members else set(self._frozen)
        self._set_frozen(set(self._frozen) - numbers)
        return self

    def _set_frozen(self, members: set[int]) -> None:
        self.__dict__["_frozen"] = tuple(sorted(members))
        self.mark_parameters()

    def mark_parameters(self) -> None:
        """Marks the parameters for the optimizers: which are shared, and which members are frozen.

        A deep copy of a parameter loses its marks.
        """
        mark_parameters(self, self._recipe.weights, self._frozen)

    def without_frozen_gradients(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns weights by name, so that no gradient reaches the frozen members' own parameters."""
        if not self._frozen:
            return weights
        own = {w.name for w in self._recipe.weights if w.kind == "stacked" and w.parameter}
        return {
            n: torch.where(self._frozen_rows(v), v.detach(), v) if n in own and v.requires_grad else v
            for n, v in weights.items()
        }

    def with_frozen_rows(self, value: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        """Returns a new value of a buffer, with the frozen members' rows as they are in the buffer."""
        return torch.where(self._frozen_rows(buffer), buffer, value) if self._frozen else value

    def _frozen_rows(self, like: torch.Tensor) -> torch.Tensor:
        """Returns `[N, 1, ..., 1]`: whether each member is frozen."""
        rows = torch.zeros(len(self), dtype=torch.bool)
        rows[list(self._frozen)] = True
        return rows.to(like.device).reshape(-1, *[1] * (like.ndim - 1))
