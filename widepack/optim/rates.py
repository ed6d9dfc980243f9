"""A number a member, for a learning rate or a weight decay: plain arithmetic, so that torch's schedulers take it as the number that it stands in for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError

ONE_FOR_ALL = "widepack_one_for_all"
"""An attribute of parameters that all members share: their first axis, whatever its length, is no member axis."""


class PerMember:
    """N numbers. `+ - * /` with a number or with as many; there is no order among them, so what compares rates (ReduceLROnPlateau) refuses them."""

    __slots__ = ("values",)

    def __init__(self, values: Iterable[float]) -> None:
        self.values = tuple(float(v) for v in values)

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[float]:
        return iter(self.values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PerMember) and self.values == other.values

    def __hash__(self) -> int:
        return hash(self.values)

    def __repr__(self) -> str:
        return f"PerMember({list(self.values)})"

    def _with(self, other: Any, op: Callable[[float, float], float]) -> PerMember:
        if isinstance(other, PerMember):
            if len(other) != len(self):
                raise UsageError(f"numbers for {len(self)} members and for {len(other)} cannot be put together")
            return PerMember(map(op, self.values, other.values))
        return PerMember(op(v, float(other)) for v in self.values)

    def __add__(self, other: Any) -> PerMember:
        return self._with(other, lambda a, b: a + b)

    def __sub__(self, other: Any) -> PerMember:
        return self._with(other, lambda a, b: a - b)

    def __mul__(self, other: Any) -> PerMember:
        return self._with(other, lambda a, b: a * b)

    def __truediv__(self, other: Any) -> PerMember:
        return self._with(other, lambda a, b: a / b)

    def __rsub__(self, other: Any) -> PerMember:
        return self._with(other, lambda a, b: b - a)

    def __rtruediv__(self, other: Any) -> PerMember:
        return self._with(other, lambda a, b: b / a)

    __radd__ = __add__
    __rmul__ = __mul__

    def __neg__(self) -> PerMember:
        return self * -1

    def tensor(self, like: Tensor) -> Tensor:
        """`[N, 1, ..., 1]` of `like`'s rank and device; float64 where it is, else float32."""
        wide = like.dtype in (torch.float64, torch.complex128)
        made = torch.tensor(self.values, dtype=torch.float64 if wide else torch.float32, device=like.device)
        return made.reshape(-1, *(1 for _ in range(like.ndim - 1)))


torch.serialization.add_safe_globals([PerMember])  # a scheduler's state holds rates


def number(given: Any, what: str) -> float | PerMember:
    """One number, or one a member, out of what a person writes. Raises: UsageError for what is none, or below zero."""
    if isinstance(given, PerMember):
        return given
    if isinstance(given, Tensor):
        given = given.item() if given.ndim == 0 else given.tolist()
    many = isinstance(given, Sequence) and not isinstance(given, str)
    each: list[Any] = list(given) if many else [given]
    if not each or any(isinstance(v, bool) or not isinstance(v, (int, float)) for v in each):
        raise UsageError(f"{what} is {given!r}; give a number, or a sequence or tensor [N] of one a member")
    wrong = [i for i, v in enumerate(each) if not v >= 0 or math.isinf(v)]
    if wrong:
        where = f" for member {wrong[0]}" if many else ""
        raise UsageError(f"{what} is {each[wrong[0]]}{where}; it cannot be below zero, infinite or no number")
    return PerMember(each) if many else float(each[0])
