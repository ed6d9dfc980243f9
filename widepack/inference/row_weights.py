"""Keeps the weights of all members stacked, for calls that read those of each row's own member."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..rows.per_row import PerRowProgram, replace_part, stack

MOST_BYTES = 128 * 2**20
"""The most memory that the stacked weights of an entry may take."""


class RowWeights:
    """The stacked weights of all members.

    Attributes:
        form: The function that takes them.
        values: For each weight of its program the stacked values, or the value that members share.
    """

    def __init__(self, form: PerRowProgram, members: Sequence[Sequence[Any]], changes: Counter[int]) -> None:
        self.form = form
        self.values: list[Any] = [
            stack([own[k] for own in members], how) if how else members[0][k]
            for k, how in enumerate(form.forms)
        ]
        self._changes = Counter(changes)

    @classmethod
    def of(
        cls, form: PerRowProgram, members: Sequence[Sequence[Any]], changes: Counter[int]
    ) -> RowWeights | None:
        """Stacks the weights of all members; None if their values have other shapes or take too much memory.

        members: the values of each member, in the order of the program. changes: how often each was replaced.
        """
        sizes = 0
        for number, shape in form.shapes.items():
            for own in members:
                value = own[number]
                if (
                    not isinstance(value, Tensor)
                    or tuple(value.shape) != shape
                    or value.dtype != torch.float32
                ):
                    return None
                sizes += 4 * value.numel()
        return cls(form, members, changes) if sizes <= MOST_BYTES else None

    def is_current(self, changes: Counter[int]) -> bool:
        """Returns whether no member was replaced since. changes: how often each was replaced."""
        return self._changes == changes

    def update(self, members: Sequence[Sequence[Any]], changes: Counter[int]) -> None:
        """Copies the weights of the members that were replaced since. No call reads them meanwhile."""
        for place in [p for p, count in changes.items() if count != self._changes[p]]:
            for k, how in enumerate(self.form.forms):
                if how:
                    replace_part(self.values[k], place, members[place][k], how)
        self._changes = Counter(changes)
