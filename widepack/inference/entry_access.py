"""Defines the part of a loaded model that calls its entries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch

from ..errors import UsageError
from ..planning.plan import Plan
from ..spec.entries import FORWARD
from .graph_use import GraphUse
from .loaded_entry import LoadedEntry
from .named_inputs import NamedInputs
from .reductions import Reductions
from .routes import Routes

E = TypeVar("E", bound=LoadedEntry)


class EntryAccess(Reductions, Routes, NamedInputs, Generic[E]):
    """The entries of a loaded model, and the calls of `forward`.

    Args:
        entries: The entries by name, at least one.
    """

    def __init__(self, entries: Mapping[str, E]) -> None:
        self._entries = dict(entries)
        self._default = self._entries.get(FORWARD)

    @property
    def entries(self) -> tuple[str, ...]:
        """The names of the entries."""
        return tuple(self._entries)

    @property
    def backend(self) -> str:
        """What runs the programs: `eager`, `compile`, `aot` or `onnxruntime`."""
        return self._first().backend

    @property
    def plan(self) -> Plan:
        """The plan of pattern `shared` at the smallest batch class."""
        return self._forward().plan

    def plans(self, pattern: str = "shared") -> list[Plan]:
        """Returns the plans of a pattern, one for each batch class.

        Args:
            pattern: `shared` or `each`.

        Returns:
            The plans, the smallest batch class first.
        """
        return self._forward().plans(pattern)

    def graph_use(self, pattern: str = "shared") -> list[GraphUse]:
        """Returns which calls run by CUDA graphs, and why others do not: one `GraphUse` for each batch class.

        Args:
            pattern: `shared` or `each`.

        Returns:
            The uses, the smallest batch class first.

        Raises:
            UsageError: The model was closed.

        Example:
            >>> print(ens.graph_use()[0])
        """
        return self._forward().graph_use(pattern)

    def _describe(self, members: Sequence[str]) -> str:
        """Returns the model in words, for `repr`."""
        names = ", ".join(members[:4]) + (", ..." if len(members) > 4 else "")
        others = ", ".join(n for n in self._entries if n != FORWARD)
        parts = [
            f"{len(members)} members: {names}",
            *([self._default.description] if self._default is not None else []),
            *([f"entries {others}"] if others else []),
            self._first().runs_on,
        ]
        return f"{type(self).__name__}({'; '.join(parts)})"

    # ---------------------------------------------------------------- entries

    def entry(self, name: str) -> E:
        """Returns an entry.

        Args:
            name: The method's name.

        Returns:
            A `WideEntry`, or the entry of a model over several devices or processes.

        Raises:
            UsageError: The artifact has no entry of this name.
        """
        if name not in self._entries:
            raise UsageError(f"there is no entry {name!r}; the entries are {', '.join(self._entries)}")
        return self._entries[name]

    def __getattr__(self, name: str) -> E:
        entries: dict[str, E] = self.__dict__.get("_entries", {})
        if name in entries:
            return entries[name]
        raise AttributeError(
            f"{type(self).__name__} has no attribute {name!r}; its entries are {', '.join(entries)}"
        )

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._entries]

    def _first(self) -> E:
        """Returns `forward`, or the first entry."""
        return self._default or next(iter(self._entries.values()))

    def _forward(self) -> E:
        """Returns the entry `forward`. Raises: UsageError if the artifact has none."""
        if self._default is None:
            first = next(iter(self._entries))
            raise UsageError(
                f"this model has no entry {FORWARD}; its entries are {', '.join(self._entries)}; "
                f"choose one, for example ens.{first}(...)"
            )
        return self._default

    # ---------------------------------------------------------------- calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs all members. They share every input that is not marked with `widepack.each`.

        Args:
            *args: The inputs as the member's `forward` takes them. Dtype, device and sizes must match the
                artifact.
            **kwargs: The same by name, and `state` for a model with states: `{name: [N, ...]}`.

        Returns:
            The member's own structure. Every leaf is `[N, *shape]`, where `shape` is that of the member's
            leaf; a list of N tensors if the members' shapes differ. For a model with states: (answer, new
            state).

        Raises:
            InputError: The inputs do not match what the model was built for. Nothing has run then.
            UsageError: The artifact has no entry `forward`, or the model was closed.

        Example:
            >>> y = ens(x)  # x: [B, 8], y: [N, B, 3]
            >>> y, state = ens(x, state=ens.state())  # with states
        """
        return (self._forward() if self._default is None else self._default)(*args, **kwargs)

    def each(self, *args: Any, **kwargs: Any) -> Any:
        """Runs all members, each on separate inputs: member i gets `[i]` of every input.

        Args:
            *args: For each input of the member a tensor `[N, ...]`, or a list of N tensors of one shape.
            **kwargs: The same by name, and `state` for a model with states.

        Returns:
            As a call returns.

        Raises:
            InputError: The inputs do not match what the model was built for. Nothing has run then.
            UsageError: The artifact has no entry `forward`, or the model was closed.

        Example:
            >>> y = ens.each(xs)  # xs: [N, B, 8], y: [N, B, 3]
        """
        return self._forward().each(*args, **kwargs)

    def state(self, **sizes: int) -> dict[str, torch.Tensor]:
        """Returns the states of all entries as they begin. The caller carries them from call to call.

        Args:
            **sizes: The size of each dim of the states that are inputs, for example `B=8`.

        Returns:
            `{name: [N, ...]}`: a buffer as each member's checkpoint has it, zeros for an input.

        Raises:
            UsageError: A size is missing or is of no state's dim, or the model was closed.

        Example:
            >>> state = ens.state()
            >>> for x in steps:
            ...     y, state = ens(x, state=state)
        """
        dims = {d for e in self._entries.values() for d in e.state_dims}
        if unknown := sorted(set(sizes) - dims):
            known = f"the dims of states are {', '.join(sorted(dims))}" if dims else "states have no dims"
            raise UsageError(f"no state has the dim {', '.join(unknown)}; {known}")
        return {name: value for e in self._entries.values() for name, value in e.state(**sizes).items()}

    def reduce(self, *args: Any, **kwargs: Any) -> Any:  # documented in `Reductions`
        return self._forward().reduce(*args, **kwargs)

    def route(self, *args: Any, member: Any, **kwargs: Any) -> Any:  # documented in `Routes`
        return self._forward().route(*args, member=member, **kwargs)

    def only(self, inputs: Mapping[str, Any]) -> dict[str, Any]:  # documented in `NamedInputs`
        return self._forward().only(inputs)

    def probe(self) -> None:
        """Runs the probe of every entry and both presets, even if it passed on this machine before.

        Raises:
            ProbeError: An answer is out of bounds.
        """
        for entry in self._entries.values():
            entry.probe()

    def warmup(self, patterns: Sequence[str] = ("shared",)) -> None:
        """Binds the programs of patterns now, for every entry, instead of at the first call.

        Args:
            patterns: `shared`, `each`, or both.
        """
        for entry in self._entries.values():
            entry.warmup(patterns)
