"""Defines what entries over parts of the members have in common: calls, states, reductions, routing.

A call is bound and checked for all members first, so that its errors are those of a model on one device.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from widepack_artifacts.entry import Entry
from widepack_artifacts.manifest import Manifest

from ..inference.binder import Binder
from ..inference.each import each_if_tensor
from ..inference.loaded_entry import LoadedEntry
from ..inference.member_numbers import member_numbers
from ..inference.part_reduction import Sums, figures_of
from ..inference.reduced_answer import Reduction
from ..inference.reductions import names_apart
from ..inference.router import Router, built, inputs_of_rows
from ..inference.row_groups import RowGroups
from ..spec.names import number_of
from .joined import states_of


class SplitEntry(LoadedEntry):  # its calls are documented in `LoadedEntry`
    """One entry of a model whose members are in several parts.

    Attributes:
        name: The method's name.
        entry: What the manifest says of the entry, in the dtype of the load.
        members: The names of all members.
        parts: The places of the members of each part.
        device: Where inputs are and answers are joined.
    """

    def __init__(
        self,
        entry: Entry,
        name: str,
        manifest: Manifest,
        members: tuple[str, ...],
        parts: Sequence[range],
        device: torch.device,
    ) -> None:
        self.name, self.entry, self.members = name, entry, members
        self.parts, self.device = tuple(parts), device
        self._binder = Binder(entry, len(members), device, known=manifest.state)
        self._part_of = [k for k, places in enumerate(self.parts) for _ in places]

    @property
    def state_dims(self) -> set[str]:
        leaves = [self._binder.leaves[i] for i in self._binder.carried]
        return {d.letter for leaf in leaves for d in leaf.dims if not isinstance(d, int)}

    @property
    def description(self) -> str:
        return self._binder.description

    # ---------------------------------------------------------------- what a part of the members does

    @abstractmethod
    def _outputs(self, values: Sequence[Tensor], per_member: Sequence[bool]) -> list[Any]:
        """Runs a checked call in all parts. Returns: the outputs of all members."""

    @abstractmethod
    def _sums(self, values: Sequence[Tensor], per_member: Sequence[bool], reduction: Reduction) -> Sums:
        """Runs a checked call in all parts. Returns: the sums of all members."""

    @abstractmethod
    def _rows(self, values: Sequence[Tensor], numbers: Sequence[int], groups: RowGroups) -> list[Any]:
        """Runs rows in the parts that have their members.

        numbers: of the member of each row. groups: the rows of each part. Returns: the outputs of all rows.
        """

    @abstractmethod
    def _router(self) -> Router:
        """Returns the router of any part. Raises: UsageError for an entry whose rows cannot be routed."""

    def _checked(self, check: Callable[[], Any]) -> Any:
        """Returns what `check` returns: it binds and checks a call. Parts that agree on a call do it here."""
        return check()

    # ---------------------------------------------------------------- calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state = kwargs.pop("state", None) if self._binder.states else None
        return self._answer(lambda: self._bind(args, kwargs, state), state)

    def each(self, *args: Any, **kwargs: Any) -> Any:
        state = kwargs.pop("state", None) if self._binder.states else None
        return self._answer(lambda: self._bind(args, kwargs, state, True), state)

    def _bind(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], state: Any, each: bool = False
    ) -> tuple[list[Tensor], list[bool]]:
        """Returns the tensors of a call, and for each whether it has one value for each member.

        each: every input has. Raises: InputError.
        """
        if each:
            args = [each_if_tensor(a) for a in args]
            kwargs = {k: each_if_tensor(v) for k, v in kwargs.items()}
        values, per_member = self._binder.bind(args, kwargs)
        if each:
            per_member = [True] * len(per_member)
        if self._binder.carried:
            self._binder.carry(values, per_member, state)
        self._binder.refuse_derivatives(values)
        self._binder.check(values, per_member)
        return values, per_member

    def _answer(self, bind: Callable[[], tuple[list[Tensor], list[bool]]], state: Any) -> Any:
        values, per_member = self._checked(bind)
        leaves = self._outputs(values, per_member)
        answer = built(self.entry, leaves)
        if not self._binder.states:
            return answer
        return answer, {**state, **states_of(leaves, self._binder.states)}

    def reduce(
        self,
        *args: Any,
        of: str | None = None,
        weights: Sequence[float] | None = None,
        members: Sequence[int | str] | None = None,
        dim: int = -1,
        output: str | int | None = None,
        **kwargs: Any,
    ) -> Any:
        state: Any = kwargs.pop("state", None) if self._binder.states else None

        def bind() -> tuple[Reduction, list[Tensor], list[bool]]:
            inputs, names = names_apart(args)
            chosen = None if members is None else [number_of(self.members, m) for m in members]
            reduction = Reduction.of_call(names, of, weights, dim, output, chosen)
            return reduction, *self._bind(inputs, kwargs, state)

        reduction, values, per_member = self._checked(bind)
        if self._can_sum(reduction):
            return figures_of(reduction, self._sums(values, per_member, reduction))
        leaves = self._outputs(values, per_member)
        figures = reduction.apply(built(self.entry, leaves), self.entry.outputs, True)
        if not self._binder.states:
            return figures
        return figures, {**state, **states_of(leaves, self._binder.states)}

    def _can_sum(self, reduction: Reduction) -> bool:
        """Returns whether sums of each part give the figures. Quantiles need the answers of all members, and
        so do outputs whose shapes differ; new states are answers too.
        """
        ragged = any(o.kind == "ragged" for o in self.entry.outputs)
        return all(w.figure.streamed for w in reduction.wanted) and not ragged and not self._binder.states

    def route(self, *args: Any, member: Any, **kwargs: Any) -> Any:  # documented in `Routes`
        def bind() -> tuple[Sequence[Tensor], list[int], RowGroups]:
            router = self._router()
            values = inputs_of_rows(self._binder, args, kwargs)
            self._binder.refuse_derivatives(values)
            sizes = self._binder.check(values, self._binder.none)
            numbers = member_numbers(member, self.members, sizes[router.letter])
            others = tuple((letter, size) for letter, size in sizes.items() if letter != router.letter)
            owners = [self._part_of[n] for n in numbers]
            groups = RowGroups.of(owners, lambda rows: router.fits(others, rows))
            return values, numbers, groups

        values, numbers, groups = self._checked(bind)
        return built(self.entry, self._rows(values, numbers, groups))
