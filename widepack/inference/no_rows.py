"""Answers calls without rows, which programs do not take: a few rows show what the answer is without them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from widepack_artifacts.entry import Entry

from ..errors import InputError
from ..ir.tensor_type import member_types, rank_of
from ..rows.axes import row_axis_of
from .call_check import NoRows

T = TypeVar("T")


class EmptyCall:
    """A call in which a dim of all outputs has size 0.

    Args:
        refusal: The error that the call gets otherwise.
        entry: The entry.
        values: The tensors of the call.

    Attributes:
        values: The same with as many rows of zeros as the model takes at least.

    Raises:
        InputError: The refusal, if an output has no such dim, or if the entry has states, which rows change.
    """

    def __init__(self, refusal: NoRows, entry: Entry, values: Sequence[Tensor]) -> None:
        self._refusal, letter = refusal, refusal.letter
        dims = [_from_end(o.type, letter) for o in entry.outputs]
        if entry.state or None in dims:
            raise InputError(str(refusal)) from None
        self._dims = [d for d in dims if d is not None]
        rows = max(entry.dims[letter].min, 1)
        self.values = [
            value if (dim := _from_end(i.type, letter)) is None else _rows(value, dim, rows, i.low)
            for i, value in zip(entry.inputs, values)
        ]

    def __repr__(self) -> str:
        """The same in all processes that make the same call."""
        return f"EmptyCall({self._refusal.letter})"

    def run(self, call: Callable[[], T]) -> T:
        """Returns what a call of the values returns. Raises: InputError if the model refuses it too."""
        try:
            return call()
        except (InputError, RuntimeError, IndexError, ValueError) as e:  # also of an op
            raise InputError(str(self._refusal)) from e

    def cut(self, leaves: Sequence[Any]) -> list[Any]:
        """Returns the leaves of an answer without rows."""
        return [
            [x.narrow(dim, 0, 0) for x in leaf] if isinstance(leaf, (list, tuple)) else leaf.narrow(dim, 0, 0)
            for leaf, dim in zip(leaves, self._dims)
        ]


def _from_end(type_: str, letter: str) -> int | None:
    """Returns the dim of the rows, counted from the end: a member axis does not change that. None: it has no
    such dim, or several.
    """
    try:
        axes = [(row_axis_of(t, letter), rank_of(t)) for t in member_types(type_)]
    except ValueError:
        return None
    found = {None if axis is None else axis.dim - rank for axis, rank in axes}
    return found.pop() if len(found) == 1 else None


def _rows(value: Tensor, dim: int, rows: int, low: int | None) -> Tensor:
    shape = list(value.shape)
    shape[dim] = rows
    return value.new_full(shape, max(low or 0, 0))
