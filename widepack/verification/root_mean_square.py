"""Takes root mean squares of numbers of any size.

The square of a float64 number over 1e154 is inf, and that of a number below 1e-162 is 0. So the numbers are
divided by the largest of them before they are squared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass
class RootMeanSquare:
    """The root mean square of numbers that are added in several parts.

    Attributes:
        largest: The largest absolute value so far, by which the numbers are divided before they are squared.
        squares: The sum of the squares of the divided numbers.
        count: How many numbers were added.
    """

    largest: float = 0.0
    squares: float = 0.0
    count: int = 0

    @property
    def value(self) -> float:
        """The root mean square; 0 without numbers."""
        return self.largest * math.sqrt(self.squares / self.count) if self.count else 0.0

    def add(self, numbers: torch.Tensor) -> None:
        """Adds the numbers of a tensor. Numbers in float32 or a coarser dtype are raised to float64."""
        if numbers.numel():
            sizes = numbers.abs().double()
            largest = float(sizes.max())
            divided = sizes / largest if 0 < largest < math.inf else (sizes > 0).double()  # inf / inf is NaN
            self._add(largest, float(divided.square_().sum()), numbers.numel())

    def add_value(self, value: float, count: int) -> None:
        """Adds `count` numbers whose root mean square is `value`."""
        if count:
            self._add(value, float(count), count)

    def raise_to(self, value: float) -> None:
        """Raises the root mean square to at least this one. The count stays."""
        if self.count and self.value < value:
            self.largest, self.squares = value, float(self.count)

    def _add(self, size: float, squares: float, count: int) -> None:
        self.count += count
        if size > self.largest:
            self.largest, self.squares, size, squares = size, squares, self.largest, self.squares
        if size:
            self.squares += squares * (size / self.largest) ** 2 if self.largest < math.inf else 0.0


def root_mean_square(numbers: torch.Tensor) -> float:
    """Returns the root mean square of the numbers of a tensor; 0 for an empty one."""
    found = RootMeanSquare()
    found.add(numbers)
    return found.value
