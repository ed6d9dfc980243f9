"""Provides the terms that cost rules share: numbers of tensors, and the time of one multiplication in a
matrix product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from ..ir.limits import tensors


class Cost(NamedTuple):
    """The cost of one op. work: nanoseconds of one core. room: bytes that it takes beside its result."""

    work: float
    room: float = 0.0


Rule = Callable[[str, Mapping[str, Any], Any], Cost]
"""A cost rule.

Arguments: the op's name without overload, its arguments by name, and its result. The time of the call is
added later.
"""

NOTHING = Cost(0.0, 0.0)
STEP = 30_000.0
"""Nanoseconds that a step of a recurrent layer takes beside its numbers."""
_MATRIX = {
    "float32": 0.04,
    "float64": 0.08,
    "bfloat16": 0.3,
    "float16": 1.0,
    "complex64": 0.16,
    "complex128": 0.32,
}
_OTHER_MATRIX = 2.0


def rate(x: torch.Tensor | None) -> float:
    """Nanoseconds of a multiplication and an addition in a matrix product, in the dtype of a tensor."""
    return _OTHER_MATRIX if x is None else _MATRIX.get(str(x.dtype).removeprefix("torch."), _OTHER_MATRIX)


def first_tensor(value: Any) -> torch.Tensor | None:
    """The first tensor of an argument or a result."""
    return next(tensors(value), None)


def count(value: Any) -> int:
    """The number of numbers in all tensors of arguments or results."""
    return sum(t.numel() for t in tensors(value))


def broadcast_count(args: Mapping[str, Any]) -> int:
    """The number of numbers of all tensors of a call after they broadcast to one shape."""
    shapes = [list(t.shape) for t in tensors(dict(args))]
    rank = max(map(len, shapes), default=0)
    padded = [[1] * (rank - len(s)) + s for s in shapes]
    return math.prod(max(row) for row in zip(*padded)) if padded else 0
