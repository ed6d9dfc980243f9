"""Represents the values of a wide program while it is written, by kind.

| class | stored as | meaning |
|---|---|---|
| `Shared(value)` | one value `[...]` | one value for all members |
| `Stacked(value)` | one tensor `[N, ...]` | one value for each member, on axis 0 |
| `Ragged(members)` | a list of N values | one value for each member, of different shapes; or N integers |

A `Value` is an argument or a result of an op: a name in the program with a fake tensor (in tests a real one),
from which rules read rank, sizes and dtype. A size that is not known when the program is written is None, so
that no rule branches on it by accident. The strides of a Stacked tensor show whether it is channel-packed;
that never changes what it means.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from widepack_artifacts.program import Ref

from .size_terms import is_large


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """A value of a program in the making.

    ref: its name; fake: a fake tensor, in tests a real one; or a SymInt, or a list of these.
    """

    ref: Ref | None
    fake: Any

    @property
    def ndim(self) -> int:
        return int(self.fake.ndim)

    @property
    def dtype(self) -> torch.dtype:
        return self.fake.dtype  # type: ignore[no-any-return]

    @property
    def sizes(self) -> tuple[int | None, ...]:
        """The sizes; None for each size that is only known at run time."""
        return tuple(known(s) for s in self.fake.shape)

    @property
    def is_tensor(self) -> bool:
        return isinstance(self.fake, torch.Tensor)


def known(size: Any) -> int | None:
    """The size if it is a number, else None."""
    if isinstance(size, int):
        return size
    expr = getattr(getattr(size, "node", None), "expr", None)
    return int(expr) if expr is not None and expr.is_number else None


def expression(size: Any) -> Any:
    """A size as an expression over the symbols of the dims."""
    import sympy  # takes a load half a second, and a load has no such sizes

    return sympy.Integer(size) if isinstance(size, int) else size.node.expr


def hint(size: Any) -> int:
    """A size, or its example if it is only known at run time: for choices that change speed and never
    results.

    A size that is data has no example: it counts as `_SIZE_OF_DATA`.
    """
    if isinstance(size, int):
        return size
    if size.node.hint is not None:
        return int(size.node.hint)
    import sympy  # as above

    expr, examples = size.node.expr, _examples(size.node.shape_env)
    return int(expr.xreplace({s: examples.get(s, sympy.Integer(_SIZE_OF_DATA)) for s in expr.free_symbols}))


_SIZE_OF_DATA = 8


def _examples(environment: Any) -> dict[Any, Any]:
    """Returns the examples of sizes by their symbols. Their name in torch changed after 2.11."""
    found = getattr(environment, "backed_var_to_val", None)
    return dict(environment.var_to_val if found is None else found)


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """One value for all members.

    Attributes:
        value: The value: a `Value`, or a literal.

    Example:
        >>> bias = widepack.primitives.Shared(x.value)
    """

    value: Any


@dataclass(frozen=True, slots=True, eq=False)
class WeightFactors:
    """The parts of a Stacked weight: member i's weight is `(base + left[i] @ right[i]) * scale[i]`, in the
    base's shape.

    base: Shared `[O, ...]`; left: Stacked `[N, O, r]`; right: Stacked `[N, r, I]`; scale: Stacked `[N, O, 1]`
    or `[N, 1, I]`, or None.
    """

    base: Shared
    left: Stacked
    right: Stacked
    scale: Stacked | None = None


@dataclass(frozen=True, slots=True, eq=False)
class GatheredMatrices:
    """The parts of a Stacked value that has a matrix for each number of an index: member i's value is
    `table[i][index[i]]`.

    table: Shared or Stacked matrices of a member's experts, `[E, P, Q]`; index: Shared or Stacked numbers of
    experts, `[*s]`.
    """

    table: Shared | Stacked
    index: Shared | Stacked


@dataclass(frozen=True, slots=True, eq=False)
class Stacked:
    """One value for each member, in one tensor `[N, ...]`.

    Attributes:
        value: The tensor.
        factors: The parts of a weight that has parts.
        gathered: The parts of matrices that an index selects.

    Example:
        >>> y = widepack.primitives.Stacked(w.call("relu", x.value))
    """

    value: Value
    factors: WeightFactors | None = None
    gathered: GatheredMatrices | None = None

    @property
    def rank(self) -> int:
        """The rank of a member's value.

        Example:
            >>> x.rank
            2
        """
        return self.value.ndim - 1

    @property
    def packed(self) -> bool:
        """Whether the memory is channel-packed: `[N, B, C, ...]` becomes `[B, N*C, ...]` without a copy.

        Example:
            >>> x.packed
            False
        """
        fake = self.value.fake
        if self.rank < 2:
            return False
        members, channels, channel = fake.stride(0), fake.shape[2], fake.stride(2)
        if all(isinstance(s, int) for s in (members, channels, channel)):
            return bool(members == channels * channel)
        difference = expression(members) - expression(channels) * expression(channel)
        return not is_large(difference) and bool(difference.expand() == 0)


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """One value for each member, with different shapes."""

    members: Value


WideValue = Shared | Stacked | Ragged
