"""Defines where the rows of a batch are in a value.

| layout | the value |
|---|---|
| `None` | has no dim that depends on the batch, and does not depend on the rows |
| `EVEN` | has such a dim, and does not change along it: `zeros(B, T)`, a bias expanded to `[B, T]` |
| `RowAxis(dim, before, after)` | along `dim`, the place `i` belongs to the row `i // after % B` |
| `RowNumbers(axis)` | has the number of the row at each row: `arange(B)` |
| `UNKNOWN` | may depend on any row, or a number on how many there are: no rule shows that it does not |
| a list | has several parts, one layout for each |

A dim may be a product with the batch in it. After `x.reshape(B * T, C)` with x `[B, T, C]`, dim 0 has the
size `B * T`, with `before=1` and `after=T`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace


class Even(enum.Enum):
    """The layout of a value that has a dim of the batch and does not change along it."""

    EVEN = "even"


class Unknown(enum.Enum):
    """The layout of a value of which no rule shows which rows it depends on."""

    UNKNOWN = "unknown"


EVEN = Even.EVEN
UNKNOWN = Unknown.UNKNOWN


@dataclass(frozen=True, slots=True)
class RowAxis:
    """The dim of the rows. Its size is `before * B * after`."""

    dim: int
    before: int = 1
    after: int = 1

    @property
    def plain(self) -> bool:
        """Whether the dim has one place for each row."""
        return self.before == self.after == 1

    def shifted(self, by: int) -> RowAxis:
        """Returns the same axis of a value with `by` more dims in front."""
        return replace(self, dim=self.dim + by)


@dataclass(frozen=True, slots=True)
class RowNumbers:
    """The layout of a value that has the number of the row at each row."""

    axis: RowAxis


Layout = Even | Unknown | RowAxis | RowNumbers | list["Layout"] | None


def places_of_a_row(shape: Sequence[int], axis: RowAxis) -> int:
    """Returns how many numbers, in the order of memory, one row has before the next row begins."""
    return math.prod(shape[axis.dim + 1 :]) * axis.after


def axis_of(shape: Sequence[int], places: int, rows: int) -> RowAxis | None:
    """Returns the axis of a shape in which rows follow each other at a distance.

    Args:
        shape: The sizes of a value.
        places: The distance from one row to the next, in numbers, in the order of memory.
        rows: The number of rows.

    Returns:
        The axis, or None if the rows are spread over several dims, or if the value is empty.
    """
    if places == 0 or 0 in shape:
        return None
    later = 1
    for dim in reversed(range(len(shape))):
        if places % later == 0:
            after = places // later
            if shape[dim] % (after * rows) == 0:
                return RowAxis(dim, shape[dim] // (after * rows), after)
        later *= shape[dim]
    return None
