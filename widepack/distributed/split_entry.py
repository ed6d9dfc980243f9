"""Defines what entries over parts of the members have in common: calls, states, reductions, routing.

A call is bound and checked for all members first, so that its errors are those of a model on one device.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from widepack_artifacts.manifest import Manifest

from ..inference.binder import Binder
from ..inference.call_check import NoRows
from ..inference.entry import WideEntry
from ..inference.graph_pool import GraphUse
from ..inference.input_values import each_if_tensor
from ..inference.loaded_entry import LoadedEntry
from ..inference.members.member import Member
from ..inference.no_rows import EmptyCall
from ..inference.output import built
from ..inference.reduced_answer import Reduction
from ..inference.routing.member_numbers import member_numbers
from ..inference.routing.router import inputs_of_rows
from ..inference.routing.row_groups import RowGroups
from ..planning.plan import Plan
from ..spec.names import number_of
from ..system.gate import Gate
from .part_calls import Sums, figures_of, states_of


class _Bound(NamedTuple):
    """A checked call.

    values: Its tensors. per_member: For each whether it has one value for each member. empty: What cuts the
    answer, if the call has no rows.
    """

    values: Sequence[Tensor]
    per_member: Sequence[bool]
    empty: EmptyCall | None = None

    def cut(self, leaves: list[Any]) -> list[Any]:
        """Returns the leaves of the answer, without rows if the call has none."""
        return leaves if self.empty is None else self.empty.cut(leaves)


class SplitEntry(LoadedEntry):  # its calls are documented in `LoadedEntry`
    """One entry of a model whose members are in several parts.

    Attributes:
        name: The method's name.
        entry: What the manifest says of the entry, in the dtype of the load.
        members: The names of all members.
        parts: The places of the members of each part.
        device: Where inputs are and answers are joined.

    Args:
        here: The parts in this process, at least one, by their numbers.
        gate: What calls of all of them pass.
    """

    def __init__(
        self,
        name: str,
        here: Mapping[int, WideEntry],
        manifest: Manifest,
        members: tuple[str, ...],
        parts: Sequence[range],
        gate: Gate,
        device: torch.device,
    ) -> None:
        self._here, self._gate, self._manifest = here, gate, manifest
        self._first = next(iter(here.values()))
        self.name, self.entry, self.members = name, self._first.entry, members
        self.parts, self.device = tuple(parts), device
        self._binder = Binder(self.entry, len(members), device, known=manifest.state)
        self._part_of = [k for k, places in enumerate(self.parts) for _ in places]
        self._lock: AbstractContextManager[Any] = nullcontext()  # is held during a call

    # ---------------------------------------------------------------- the parts in this process

    @property
    def backend(self) -> str:
        return "+".join(dict.fromkeys(e.backend for e in self._here.values()))

    @property
    def runs_on(self) -> str:
        return " + ".join(e.runs_on for e in self._here.values())

    @property
    def swapped(self) -> bool:
        return any(e.swapped for e in self._here.values())

    def plans(self, pattern: str = "shared") -> list[Plan]:
        """Returns the plans of the first part that is in this process, one for each batch class.

        Args:
            pattern: `shared` or `each`.

        Returns:
            The plans, the smallest batch class first.
        """
        return self._first.plans(pattern)

    def graph_use(self, pattern: str = "shared") -> list[GraphUse]:
        """Returns which calls of the first part in this process run by CUDA graphs, and why others do not.

        Args:
            pattern: `shared` or `each`.

        Returns:
            One `GraphUse` for each batch class, the smallest first.
        """
        return self._first.graph_use(pattern)

    def warmup(self, patterns: Sequence[str] = ("shared",)) -> None:
        for entry in self._here.values():
            entry.warmup(patterns)

    def probe(self) -> None:
        for entry in self._here.values():
            entry.probe()

    def member(self, member: int | str) -> Member:
        place = number_of(self.members, member)
        self.refuse_elsewhere(place)
        part = self._part_of[place]
        return self._here[part].member(place - self.parts[part].start)

    def refuse_elsewhere(self, place: int) -> None:
        """Raises: UsageError for a member of another process. place: of the member."""

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

    def _bind(self, args: Sequence[Any], kwargs: Mapping[str, Any], state: Any, each: bool = False) -> _Bound:
        """Returns a checked call. each: every input has one value for each member. Raises: InputError."""
        if each:
            args = [each_if_tensor(a) for a in args]
            kwargs = {k: each_if_tensor(v) for k, v in kwargs.items()}
        values, per_member = self._binder.bind(args, kwargs)
        if each:
            per_member = [True] * len(per_member)
        if self._binder.carried:
            self._binder.carry(values, per_member, state)
        return self._bound(values, per_member)

    def _bound(self, values: Sequence[Tensor], per_member: Sequence[bool]) -> _Bound:
        """Returns a call after its checks. Raises: InputError."""
        self._binder.refuse_derivatives(values)
        try:
            self._binder.check(values, per_member)
        except NoRows as e:
            empty = EmptyCall(e, self.entry, values)
            empty.run(lambda: self._binder.check(empty.values, per_member))
            return _Bound(empty.values, per_member, empty)
        return _Bound(values, per_member)

    def _answer(self, bind: Callable[[], _Bound], state: Any) -> Any:
        with self._lock:
            call = self._checked(bind)
            leaves = call.cut(self._outputs(call.values, call.per_member))
        answer = built(self.entry.result, leaves)
        if not self._binder.states:
            return answer
        return answer, {**state, **states_of(leaves, self._binder.states)}

    def _reduce(
        self, request: Callable[[], tuple[Reduction, Sequence[Any]]], kwargs: Mapping[str, Any], state: Any
    ) -> Any:
        def bind() -> tuple[Reduction, _Bound]:
            reduction, inputs = request()
            return reduction, self._bind(inputs, kwargs, state)

        with self._lock:
            reduction, call = self._checked(bind)
            if call.empty is None and self._can_sum(reduction):
                return figures_of(reduction, self._sums(call.values, call.per_member, reduction))
            leaves = call.cut(self._outputs(call.values, call.per_member))
        figures = reduction.apply(built(self.entry.result, leaves), self.entry.outputs, True)
        if not self._binder.states:
            return figures
        return figures, {**state, **states_of(leaves, self._binder.states)}

    def _can_sum(self, reduction: Reduction) -> bool:
        """Returns whether sums of each part give the figures. Quantiles need the answers of all members, and
        so do outputs whose shapes differ; new states are answers too.
        """
        ragged = any(o.kind == "ragged" for o in self.entry.outputs)
        return all(w.figure.streamed for w in reduction.wanted) and not ragged and not self._binder.states

    def route(self, *args: Any, member: Any, **kwargs: Any) -> Any:
        def bind() -> tuple[_Bound, list[int], RowGroups]:
            router = self._first.router
            call = self._bound(inputs_of_rows(self._binder, args, kwargs), self._binder.none)
            sizes = self._binder.check(call.values, call.per_member)
            numbers = member_numbers(member, self.members, sizes[router.letter] if call.empty is None else 0)
            numbers = numbers or [0] * sizes[router.letter]
            others = tuple((letter, size) for letter, size in sizes.items() if letter != router.letter)
            owners = [self._part_of[n] for n in numbers]
            groups = RowGroups.of(owners, lambda rows: router.fits(others, rows))
            return call, numbers, groups

        with self._lock:
            call, numbers, groups = self._checked(bind)
            leaves = self._rows(call.values, numbers, groups)
        return built(self.entry.result, call.cut(leaves))
