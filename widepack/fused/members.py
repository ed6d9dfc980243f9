"""Defines the part of `Fused` that is about single members: modules, copies, frozen and removed members."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from widepack_artifacts.errors import some

from ..capture.call import MemberCall
from ..checkpoints.differences import bit_equal
from ..errors import UsageError
from ..ir.guards import InputLeaf
from ..ir.tensor_type import parse_slot
from ..optim import removal
from ..spec.dtypes import dtype_name
from .programs import CPU, FusedEntry
from .recipe import FusedRecipe
from .skeleton import weights_of
from .stacked_parameters import mark_parameters, member_module, slot_of


def keep_rows(tensor: torch.Tensor, rows: Sequence[int]) -> None:
    """Keeps some rows of a parameter or buffer, and of its gradient.

    A backward pass of a call before the removal is refused by torch, because the weights have changed.

    Args:
        tensor: `[N, ...]`.
        rows: The numbers of the rows that stay.
    """
    kept = list(rows)
    torch.clear_autocast_cache()  # it has copies of the weights in another dtype
    with torch.inference_mode(False), torch.no_grad():
        values = tensor.detach()[kept]
        tensor[:0].zero_()  # counts as a write
        if isinstance(tensor, nn.Parameter):
            gradient = None if tensor.grad is None else tensor.grad.detach()[kept]
            tensor.grad = None
            # torch keeps the node that accumulates the gradient, which expects the shape of before, until
            # the dtype changes
            other = torch.float32 if tensor.dtype != torch.float32 else torch.float64
            tensor.data = torch.empty(0, dtype=other, device=tensor.device)
            tensor.data = values
            tensor.grad = gradient
        else:
            tensor.data = values


def with_dtypes(call: MemberCall, dtypes: Mapping[torch.dtype, torch.dtype]) -> MemberCall:
    """Returns a call with its tensors on the CPU. dtypes: the new dtype for each old one that changes."""

    def converted(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.detach().to(CPU, dtypes.get(value.dtype, value.dtype))

    args, kwargs = pytree.tree_map(converted, (call.args, call.kwargs))
    leaves = [_with_example(leaf, converted(leaf.example)) for leaf in call.leaves]
    return replace(call, args=args, kwargs=kwargs, leaves=tuple(leaves))


def _with_example(leaf: InputLeaf, example: torch.Tensor) -> InputLeaf:
    """Returns a leaf of the call with another example."""
    slot = parse_slot(leaf.type).with_dtype(dtype_name(example.dtype))
    return replace(leaf, example=example, type=str(slot))


if TYPE_CHECKING:
    from typing_extensions import Self


class FusedMembers(nn.Module):
    """The members of a fused module, one at a time. `Fused` is one."""

    _recipe: FusedRecipe
    _entries: dict[Any, FusedEntry]  # by modes, dtypes and device
    _slots: dict[str, tuple[dict[str, Any], str]]  # of the weights, by name
    _parts: dict[str, nn.Module]
    _frozen: tuple[int, ...] = ()  # the numbers of the frozen members
    _originals: tuple[int, ...] | None = None  # the members' numbers at the start, if some were removed

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

        Example:
            >>> fused.tensor_of("layer.weight").shape
            torch.Size([3, 16, 8])
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
        if not isinstance(i, int) or isinstance(i, bool) or not -len(self) <= i < len(self):
            raise UsageError(f"there is no member {i!r}; there are {len(self)}, counted from 0")
        return i % len(self)

    def tensors_of(self, entry: FusedEntry) -> dict[str, torch.Tensor]:
        """Returns the weights and constants that an entry's programs read, by name."""
        return {
            s.source: entry.constants[s.source] if s.source in entry.constants else self.tensor_of(s.source)
            for s in entry.programs[0].weights
        }

    def _modes(self) -> tuple[bool, ...]:
        """Returns for each part whether it is in train mode."""
        if not self._parts:
            self._parts.update(self.named_modules())
        return tuple([part.training for part in self._parts.values()])

    def sample(self) -> MemberCall:
        """Returns the sample on the CPU, in the dtypes that the weights have now."""
        recipe = self._recipe
        captured = {name: value.dtype for name, value in weights_of(recipe.skeletons[0].module).items()}
        now = {w.name: self.tensor_of(w.name).dtype for w in recipe.weights}
        dtypes = {captured[name]: dtype for name, dtype in now.items() if captured[name] != dtype}
        return with_dtypes(recipe.call, dtypes)

    @property
    def drops_only_when_fused(self) -> bool:
        """Whether the fused module applies dropout where a member by itself, in this mode, does not."""
        return self._recipe.dropout and not any(self._modes())

    def unfuse(self) -> list[nn.Module]:
        """Returns the members as N modules of the original class.

        Returns:
            N copies, with weights and buffers as they are now, bit for bit. They share nothing with the fused
            module.

        Example:
            >>> models = fused.unfuse()
        """
        return [self.member(i) for i in range(len(self))]

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads the parameters and buffers of all members, as `nn.Module.load_state_dict` does.

        Args:
            state_dict: What `state_dict` of a fused module of N members returned.
            strict: Whether the names must be the same. Default: True.
            assign: As in torch. Default: False.

        Returns:
            The names that are missing and those that are unexpected, as torch returns them.

        Raises:
            UsageError: The state is of another number of members, or of other modules.

        Example:
            >>> fused.load_state_dict(torch.load("run.pt"))
        """
        counts = set()
        for weight in self._recipe.weights:
            value = state_dict.get(weight.name)
            if weight.kind == "stacked" and isinstance(value, torch.Tensor) and value.ndim:
                same = value.shape[1:] == self.tensor_of(weight.name).shape[1:]
                counts.add(value.shape[0] if same else None)
        if len(counts) == 1 and (count := counts.pop()) not in (len(self), None):
            raise UsageError(
                f"load_state_dict: the state is of {count} members, and the fused module has {len(self)}. "
                f"Fuse {count} members and load it there, or remove members first, as when it was saved: "
                "fused.remove(i)"
            )
        try:
            return super().load_state_dict(state_dict, strict, assign)
        except RuntimeError as e:
            first, *problems = [line.strip() for line in str(e).splitlines() if line.strip()] or [""]
            raise UsageError(some([f"load_state_dict: {first}", *problems], 4, "\n")) from e

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

    def load_member(self, i: int, state_dict: Mapping[str, Any]) -> Self:
        """Overwrites one member's parameters and buffers with those of a member's own state dict, in place.

        The state of an optimizer for the member does not change.

        Args:
            i: The number of the member that is overwritten.
            state_dict: Of a module as the members are, for example of `fused.member(i)`.

        Returns:
            The fused module itself.

        Raises:
            UsageError: No such member exists, names or shapes are other ones, or a weight that is one copy
                for all members would get another value. Nothing has changed.

        Example:
            >>> fused = fused.load_member(0, fused.member(1).state_dict())
        """
        i, own = self._number(i), self.member(i)
        try:
            own.load_state_dict(state_dict)
        except RuntimeError as e:
            raise UsageError(f"load_member: {' '.join(str(e).split())[:600]}") from e
        values = weights_of(own)
        for weight in self._recipe.weights:
            if weight.kind != "stacked" and not bit_equal(values[weight.name], self.tensor_of(weight.name)):
                raise UsageError(
                    f"load_member: {weight.name} is one copy for all members, and the state has another value"
                )
        with torch.no_grad():
            for weight in self._recipe.weights:
                if weight.kind == "stacked":
                    self.tensor_of(weight.name)[i].copy_(values[weight.name])
        return self

    # ---------------------------------------------------------------- removed members

    @property
    def original_numbers(self) -> tuple[int, ...]:
        """The numbers that the members had when they were fused: `(0, 2)` after `remove(1)` of three.

        Example:
            >>> fused.original_numbers
            (0, 1, 2)
        """
        return tuple(range(len(self))) if self._originals is None else self._originals

    def remove(
        self,
        *members: int,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        scheduler: Any = None,
    ) -> list[nn.Module]:
        """Removes members from the module and returns them, while the others train on.

        A removed member costs nothing more. The parameters stay the same objects and have fewer rows, so an
        optimizer over them continues. The members that stay are counted from 0 again. The next call in each
        mode makes a program for them, without a new capture. Call `backward` before members are removed.

        Args:
            *members: The numbers of the members.
            optimizer: The optimizer over the module's parameters, or a list of them: of `widepack.optim`, or
                one of `torch.optim` that works number by number. It loses the members' rows of its states,
                and their numbers of its options.
            scheduler: The optimizer's scheduler, or a list of them: a `PerMemberScheduler`, or one of torch.

        Returns:
            The members as modules of the original class, in the order of the call.

        Raises:
            UsageError: No such member exists; none would be left; all members are passes of one model; or
                the optimizer's state cannot be separated by members. Nothing has changed.

        Example:
            >>> (finished,) = fused.remove(2, optimizer=optimizer, scheduler=scheduler)
        """
        numbers = [self._number(i) for i in members]
        if self._recipe.one_model:
            raise UsageError("the members are passes of one model: fuse it again with a smaller n")
        if len(set(numbers)) != len(numbers):
            raise UsageError(f"remove: the members are {list(members)}; give each of them once")
        kept = [i for i in range(len(self)) if i not in numbers]
        if not kept:
            raise UsageError(
                f"remove: no member would be left of {len(self)}; take the last ones with fused.unfuse()"
            )
        own = [w for w in self._recipe.weights if w.kind == "stacked"]
        tensors = [self.tensor_of(w.name) for w in own]
        parameters = [t for t in tensors if isinstance(t, nn.Parameter)]
        schedulers = removal.schedulers_of(scheduler)
        optimizers = removal.optimizers_of(optimizer, schedulers)
        for o in optimizers:
            removal.check_optimizer(o, parameters, len(self))
        for s in schedulers:
            removal.check_scheduler(s, len(self))
        removed = [self.member(i) for i in numbers]
        if numbers:
            for o in optimizers:
                removal.remove_from_optimizer(o, parameters, len(self), kept)
            for s in schedulers:
                removal.remove_from_scheduler(s, len(self), kept)
            for t in tensors:
                keep_rows(t, kept)
            removal.mark_removed(parameters)
            self._keep(kept)
        return removed

    def _keep(self, kept: Sequence[int]) -> None:
        """Keeps the recipe, the programs and the marks of some members, whose tensors have their rows."""
        frozen = {n for n, i in enumerate(kept) if i in self._frozen}
        skeletons = [self._recipe.skeletons[i] for i in kept]
        self.__dict__["_originals"] = tuple(self.original_numbers[i] for i in kept)
        self.__dict__["_recipe"] = replace(self._recipe, skeletons=skeletons)
        self.__dict__["_entries"] = {key: e.with_members(kept) for key, e in self._entries.items()}
        self._set_frozen(frozen)

    # ---------------------------------------------------------------- frozen members

    @property
    def frozen_members(self) -> tuple[int, ...]:
        """The numbers of the members that `freeze` has frozen.

        Example:
            >>> fused.freeze(2).frozen_members
            (2,)
        """
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

        Example:
            >>> fused = fused.freeze(2).unfreeze()
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
