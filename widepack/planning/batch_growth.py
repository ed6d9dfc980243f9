"""Computes how figures of a program grow with its batch: bytes of activations, rows of layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

T = TypeVar("T")
SMALL, LARGE = 4, 8
"""The batches at which figures are computed."""


@dataclass(frozen=True)
class Growth:
    """A figure at a batch: `fixed + slope * batch`."""

    fixed: float
    slope: float

    @classmethod
    def between(cls, small: float, large: float) -> Growth:
        """Returns the growth of a figure, from its values at the batches `SMALL` and `LARGE`."""
        slope = (large - small) / (LARGE - SMALL)
        return cls(small - SMALL * slope, slope)

    def largest(self, limit: float) -> int | None:
        """Returns the largest batch whose figure is at most `limit`: None for every one, 0 for none."""
        if self.slope <= 0:
            return None if self.fixed + SMALL * self.slope <= limit else 0
        return max(0, math.floor((limit - self.fixed) / self.slope))

    def smallest(self, limit: float) -> float:
        """Returns the smallest batch at which the figure is at least `limit`; infinity for none."""
        if self.slope <= 0:
            return 1 if self.fixed + SMALL * self.slope >= limit else math.inf
        return max(1, math.ceil((limit - self.fixed) / self.slope))


def at_two_batches(
    figure: Callable[[Mapping[str, int]], T], sizes: Mapping[str, int], batch: str
) -> tuple[T, T] | None:
    """Returns a figure at the batches `SMALL` and `LARGE`; None if sizes depend on values.

    If the batch cannot change alone to these, because a guard ties it to another dim or the program needs
    more rows, both are those of the example.

    Args:
        figure: Computes the figure from the size of each dim.
        sizes: An example size of each dim.
        batch: The dim of the batch, or "".
    """
    try:
        small, large = (figure({**sizes, batch: b} if batch else sizes) for b in (SMALL, LARGE))
    except (DataDependentOutputException, DynamicOutputShapeException):
        return None
    except (RuntimeError, IndexError, ValueError):
        small = large = figure(sizes)
    return small, large


def growth(
    figure: Callable[[Mapping[str, int]], float], sizes: Mapping[str, int], batch: str
) -> Growth | None:
    """Returns the growth of one figure; None if sizes depend on values. Arguments: as `at_two_batches`."""
    found = at_two_batches(figure, sizes, batch)
    return None if found is None else Growth.between(*found)
