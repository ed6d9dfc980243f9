"""Defines what every entry of a loaded model can do, wherever its members are."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from ..planning.plan import Plan
from .graph_use import GraphUse
from .member import Member
from .named_inputs import NamedInputs
from .reductions import Reductions
from .routes import Routes


class LoadedEntry(Reductions, Routes, NamedInputs):
    """One entry of a loaded model: one method of the members, for all members at once.

    Attributes:
        name: The method's name.
        members: The members' names.
    """

    name: str
    members: tuple[str, ...]

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs all members. They share every input that is not marked with `widepack.each`.

        Args:
            *args: The inputs as the member's method takes them. Dtype, device and sizes must match the entry.
            **kwargs: The same by name, and `state` for an entry with states: `{name: [N, ...]}`.

        Returns:
            The member's own structure. Every leaf is `[N, *shape]`, where `shape` is that of the member's
            leaf; a list of N tensors if the members' shapes differ. For an entry with states: (answer, new
            state). A state has one value for each member in every pattern.

        Raises:
            InputError: The inputs do not match the entry. Nothing has run then.
            UsageError: The model was closed.

        Example:
            >>> y = ens(x)  # x: [B, 8], y: [N, B, 3]
            >>> y, state = ens(x, state=ens.state())  # with states
        """

    @abstractmethod
    def each(self, *args: Any, **kwargs: Any) -> Any:
        """Runs all members, each on separate inputs: member i gets `[i]` of every input.

        Args:
            *args: For each input of the member a tensor `[N, ...]`, or a list of N tensors of one shape.
            **kwargs: The same by name, and `state` for an entry with states.

        Returns:
            As a call returns.

        Raises:
            InputError: The inputs do not match the entry. Nothing has run then.
            UsageError: The model was closed.

        Example:
            >>> y = ens.each(xs)  # xs: [N, B, 8], y: [N, B, 3]
        """

    @abstractmethod
    def state(self, **sizes: int) -> dict[str, torch.Tensor]:
        """Returns the states of this entry as they begin.

        Args:
            **sizes: The size of each dim of the states that are inputs, for example `B=8`.

        Returns:
            `{name: [N, ...]}`: a buffer as each member's checkpoint has it, zeros for an input.

        Raises:
            UsageError: A size is missing, or the model was closed.
        """

    @abstractmethod
    def member(self, member: int | str) -> Member:
        """Returns one member as a plain module. Its weights share memory with this model.

        Args:
            member: The member's number or name.

        Returns:
            A `Member`.

        Raises:
            UsageError: No loaded member has this number or name, or the model was closed.

        Example:
            >>> y0 = ens.member(0)(x)
        """

    @abstractmethod
    def plans(self, pattern: str = "shared") -> list[Plan]:
        """Returns the plans of a pattern, one for each batch class.

        Args:
            pattern: `shared` or `each`.

        Returns:
            The plans, the smallest batch class first.
        """

    @abstractmethod
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

    @abstractmethod
    def warmup(self, patterns: Sequence[str] = ("shared",)) -> None:
        """Binds the programs of patterns now instead of at the first call.

        Args:
            patterns: `shared`, `each`, or both.
        """

    @abstractmethod
    def probe(self) -> None:
        """Runs the probe of both presets, even if it passed on this machine before.

        Raises:
            ProbeError: An answer is out of bounds.
        """

    @property
    def plan(self) -> Plan:
        """The plan of pattern `shared` at the smallest batch class."""
        return self.plans()[0]

    @property
    @abstractmethod
    def backend(self) -> str:
        """The backends of pattern `shared`: one name, or several joined by `+` if batch classes differ."""

    @property
    @abstractmethod
    def state_dims(self) -> set[str]:
        """The dims of the states that are inputs."""

    @property
    @abstractmethod
    def description(self) -> str:
        """The inputs and states with their types."""

    @property
    @abstractmethod
    def runs_on(self) -> str:
        """Where the programs of pattern `shared` run: `cpu, aot`."""

    def __len__(self) -> int:
        return len(self.members)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.name} of {len(self)} members; {self.description}; {self.runs_on})"
        )

    def __reduce__(self) -> Any:
        raise TypeError(
            "an entry of a loaded model cannot be copied or pickled; take the model: ens instead of "
            f"ens.entry({self.name!r})"
        )
