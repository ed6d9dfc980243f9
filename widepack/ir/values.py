"""Values that say where their members are.

| class | held as | meaning |
|---|---|---|
| `Shared(value)` | one value `[...]` | equal for all members |
| `Stacked(value)` | one tensor `[N, ...]` | one a member, axis 0. `packed`: its memory is `[B, N*C, ...]` (the channel-packed form), as its strides tell; it never has a meaning |
| `Ragged(members)` | a list of N values | one a member, shapes differ; or N integers |

A `Value` is what an op takes and gives while programs are written: a name in the program together with a fake tensor (or a real one, in tests), so
that rules can read rank, sizes and dtype. A size that is not known when the program is written reads as None: no rule can branch on it by accident.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
import torch

from widepack_artifacts.program import Ref


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """A value of a program in the making. ref: its name; held: a fake tensor, a real one, a SymInt, or a list of them."""

    ref: Ref | None
    held: Any

    @property
    def ndim(self) -> int:
        return int(self.held.ndim)

    @property
    def dtype(self) -> torch.dtype:
        return self.held.dtype  # type: ignore[no-any-return]

    @property
    def sizes(self) -> tuple[int | None, ...]:
        """The static sizes; None for each that is only known at run time."""
        return tuple(known(s) for s in self.held.shape)

    @property
    def is_tensor(self) -> bool:
        return isinstance(self.held, torch.Tensor)


def known(size: Any) -> int | None:
    """A size that is a plain number, else None."""
    if isinstance(size, int):
        return size
    expr = getattr(getattr(size, "node", None), "expr", None)
    return int(expr) if expr is not None and expr.is_number else None


def expression(size: Any) -> Any:
    """A size as an expression over the dims' symbols."""
    return sympy.Integer(size) if isinstance(size, int) else size.node.expr


def hint(size: Any) -> int:
    """A size, or its example where it is only known at run time: for choices that cost time and never a result."""
    return size if isinstance(size, int) else int(size.node.hint)


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    value: Any


@dataclass(frozen=True, slots=True, eq=False)
class Stacked:
    value: Value

    @property
    def rank(self) -> int:
        """The member's own rank."""
        return self.value.ndim - 1

    @property
    def packed(self) -> bool:
        """Whether members lie side by side in the channels: `[N, B, C, ...]` becomes `[B, N*C, ...]` without a copy."""
        held = self.value.held
        if self.rank < 2:
            return False
        members, channels, channel = held.stride(0), held.shape[2], held.stride(2)
        if all(isinstance(s, int) for s in (members, channels, channel)):
            return bool(members == channels * channel)
        return bool(sympy.expand(expression(members) - expression(channels) * expression(channel)) == 0)


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    members: Value


Wide = Shared | Stacked | Ragged
