"""Defines `PerMember`: one number for each member, for a learning rate or another option.

It has the arithmetic of a number, so torch's schedulers work with it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError

ONE_FOR_ALL = "widepack_one_for_all"
"""The attribute of parameters that all members share: their axis 0 is not the member axis, whatever its
length.
"""

FROZEN = "widepack_frozen"
"""The attribute of parameters with the numbers of the members that `Fused.freeze` has frozen."""


def combined(op: Callable[[float, float], float], a: float | PerMember, b: float | PerMember) -> Any:
    """Returns `op(a, b)`: a number, or a `PerMember` if one of the two has a number for each member."""
    if not isinstance(a, PerMember) and not isinstance(b, PerMember):
        return op(a, b)
    if isinstance(a, PerMember) and isinstance(b, PerMember) and len(a) != len(b):
        raise UsageError(f"rates of {len(a)} members and of {len(b)} cannot be combined")
    one = a if isinstance(a, PerMember) else repeat(float(a))
    other = b if isinstance(b, PerMember) else repeat(float(b))
    return PerMember(map(op, one, other))


def _arithmetic(
    op: Callable[[Any, Any], Any], swapped: bool = False
) -> Callable[[PerMember, Any], PerMember]:
    """Returns a method of `PerMember` that computes `op(self, other)`; if swapped, `op(other, self)`."""

    def method(self: PerMember, other: Any) -> PerMember:
        result: PerMember = combined(op, other, self) if swapped else combined(op, self, other)
        return result

    return method


class PerMember:
    """One number for each member.

    It supports `+ - * / **` with a number, or with a `PerMember` of the same length. It has no order. For a
    scheduler that compares rates, such as ReduceLROnPlateau, use `PerMemberScheduler`.

    Args:
        values: N numbers.

    Example:
        >>> widepack.optim.PerMember([0.1, 0.01]) * 0.5
        PerMember([0.05, 0.005])
    """

    __module__ = "widepack.optim"  # pickles name the public place
    __slots__ = ("values",)

    def __init__(self, values: Iterable[float]) -> None:
        self.values = tuple(float(v) for v in values)

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[float]:
        return iter(self.values)

    def __getitem__(self, member: int) -> float:
        return self.values[member]

    def __float__(self) -> float:
        raise UsageError(
            f"a rate has {len(self)} numbers, one for each member, where one number is needed; a scheduler "
            "of torch that needs one number works as widepack.optim.PerMemberScheduler(optimizer, "
            "lambda o, i: ReduceLROnPlateau(o))"
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PerMember) and self.values == other.values

    def __hash__(self) -> int:
        return hash(self.values)

    def __repr__(self) -> str:
        return f"PerMember({list(self.values)})"

    __add__ = __radd__ = _arithmetic(operator.add)
    __sub__ = _arithmetic(operator.sub)
    __rsub__ = _arithmetic(operator.sub, swapped=True)
    __mul__ = __rmul__ = _arithmetic(operator.mul)
    __truediv__ = _arithmetic(operator.truediv)
    __rtruediv__ = _arithmetic(operator.truediv, swapped=True)
    __pow__ = _arithmetic(operator.pow)
    __rpow__ = _arithmetic(operator.pow, swapped=True)

    def __neg__(self) -> PerMember:
        return self * -1

    def tensor(self, like: Tensor) -> Tensor:
        """Returns the numbers as a tensor that broadcasts against a stacked one.

        Args:
            like: A tensor `[N, ...]`.

        Returns:
            `[N, 1, ..., 1]` of `like`'s rank and device, in float64 if `like` is, else in float32.

        Example:
            >>> rates = widepack.optim.PerMember([0.1, 0.01, 0.001])
            >>> rates.tensor(torch.zeros(3, 4)).shape
            torch.Size([3, 1])
        """
        double = like.dtype in (torch.float64, torch.complex128)
        rates = torch.tensor(
            self.values, dtype=torch.float64 if double else torch.float32, device=like.device
        )
        return rates.reshape(-1, *(1 for _ in range(like.ndim - 1)))


torch.serialization.add_safe_globals([PerMember])  # the state of a scheduler has rates


def numbers(option: float | PerMember) -> list[float]:
    """Returns the numbers of an option: one, or one for each member."""
    return list(option) if isinstance(option, PerMember) else [option]


def plain_numbers(value: Any) -> Any:
    """Returns a tensor's or a NumPy array's numbers as Python's, and any other value as it is."""
    return value.tolist() if callable(getattr(value, "tolist", None)) else value


def parse_rate(value: Any, label: str) -> float | PerMember:
    """Returns what a user gave as a rate: one number, or one for each member.

    `label` names the rate in messages. Raises UsageError for a value that is not a number, or below zero.
    """
    if isinstance(value, PerMember):
        return value
    value = plain_numbers(value)
    several = isinstance(value, Sequence) and not isinstance(value, str)
    numbers: list[Any] = [plain_numbers(v) for v in value] if several else [value]
    if not numbers or any(isinstance(v, bool) or not isinstance(v, (int, float)) for v in numbers):
        raise UsageError(
            f"{label} is {value!r}; give a number, or a sequence, array or tensor [N] with one for each "
            "member"
        )
    wrong = [i for i, v in enumerate(numbers) if not v >= 0 or math.isinf(v)]
    if wrong:
        where = f" for member {wrong[0]}" if several else ""
        raise UsageError(
            f"{label} is {numbers[wrong[0]]}{where}; it cannot be below zero, infinite or not a number"
        )
    return PerMember(numbers) if several else float(numbers[0])
