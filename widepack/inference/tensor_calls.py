"""Defines calls of an entry by a flat list of tensors, one for each input, as servers and tools make them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from widepack_artifacts import tree
from widepack_artifacts.entry import Entry
from widepack_artifacts.rows import Rows

from ..system.autocast import plain_modes
from .binder import Binder
from .programs import EntryPrograms


class TensorCalls:
    """Converts between the arguments of an entry and a flat list of tensors, and checks calls.

    `entry.tensor_calls` returns it. The tensors are in the order of `entry.entry.inputs`, and the leaves of
    an answer in the order of `entry.entry.outputs`.
    """

    def __init__(self, entry: Entry, binder: Binder, programs: EntryPrograms) -> None:
        self._entry, self._binder, self._programs = entry, binder, programs

    @property
    def rows(self) -> Rows:
        """Whether the rows of a batch are independent, and along which dim, derived from the programs."""
        from .entry_rows import rows_of_entry  # imports the walk over rows, which most calls do not need

        with plain_modes():
            return rows_of_entry(self._programs)

    @property
    def rows_of_callers(self) -> Rows:
        """Whether rows of several callers may share a batch: it is proved here that no row changes another.

        What the artifact says about itself does not count.
        """
        from .entry_rows import rows_of_callers  # imports the walk over rows, which most calls do not need

        with plain_modes():
            return rows_of_callers(self._programs)

    def tensors(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], pattern: str, state: Any = None
    ) -> tuple[list[torch.Tensor], list[bool]]:
        """Returns the inputs of a call as its program takes them.

        Args:
            args: The call's arguments by position.
            kwargs: The call's arguments by name.
            pattern: `each` gives every input one value for each member. Others follow the marks of
                `widepack.each`.
            state: The states, for an entry that has them.

        Returns:
            The tensors, and for each whether it has one value for each member.

        Raises:
            InputError: The arguments do not match the entry.
        """
        values, marks = self._binder.bind(tuple(args), dict(kwargs))
        per_member = [True] * len(marks) if pattern == "each" else list(marks)
        values = list(values)
        if state is not None:
            self._binder.carry(values, per_member, state)
        return values, per_member

    def arguments(
        self, tensors: Sequence[torch.Tensor]
    ) -> tuple[list[Any], dict[str, Any], dict[str, torch.Tensor]]:
        """Returns the arguments of a call.

        Args:
            tensors: One for each input of the entry, states included.

        Returns:
            The arguments by position, the arguments by name, and the states by name.
        """
        carried = self._binder.carried
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        positional = True
        for parameter in self._entry.signature:
            numbers = tree.leaves(parameter.tree)
            if carried & set(numbers):
                continue
            if not numbers and parameter.default:
                positional = False  # the call leaves it out
                continue
            value = tree.build(parameter.tree, list(tensors), lambda _, rows: dict(rows))
            positional = positional and parameter.kind == "positional"
            if positional:
                args.append(value)
            else:
                kwargs[parameter.name] = value
        return args, kwargs, {name: tensors[i] for i, _, name in self._binder.states}

    def sizes(self, tensors: Sequence[torch.Tensor], per_member: Sequence[bool]) -> dict[str, int]:
        """Checks a call without running it: dtypes, devices, shapes, bounds and guards.

        Values are not checked: an op refuses an index out of range when it runs.

        Args:
            tensors: One for each input of the entry, states included.
            per_member: For each tensor, whether it has one value for each member, `[N, ...]`.

        Returns:
            The size of each named dim.

        Raises:
            InputError: The tensors do not match the entry.
        """
        return self._binder.check(tensors, per_member)

    def leaves(self, answer: Any) -> list[Any]:
        """Returns the leaves of an answer in the order of the outputs. A leaf is a tensor, or a list of
        tensors of different shapes.

        Args:
            answer: What a call returned, without the new states.
        """
        found = self.numbered_leaves(answer)
        return [found[k] for k in sorted(found)]

    def numbered_leaves(self, answer: Any) -> dict[int, Any]:
        """Returns the leaves of an answer by the number of the output, which states may be between.

        Args:
            answer: What a call returned, without the new states.
        """
        return tree.taken(self._entry.result, answer)
