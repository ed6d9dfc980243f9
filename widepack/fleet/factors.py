"""Defines the results of `unmerge`: `Factors`, `KeptStacked`, and the `Residual` of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Source = int | Literal["given", "recovered"]
"""Where a base comes from: the caller, the member of this number, or all members together."""


class Residual(NamedTuple):
    """What the factors do not represent, of the member that they represent worst.

    rms: the root mean square of the differences from the member's weight, divided by that of rounding the
    weight to its dtype once. largest: the largest difference, in ulps of its element and of the weight's
    typical element together.
    """

    rms: float
    largest: float


@dataclass(frozen=True)
class Factors:
    """One weight of N members as a base and low-rank differences.

    A weight of more than two dims is seen as the matrix `weight.flatten(1)`. The weight of member i is
    `(base + left[i] @ right[i]) * scale[i]`, computed in float64 and rounded once to the base's dtype, except
    for the last bits, which a correction restores (correction.py).

    base: of the weight's shape, in the members' dtype. left: [N, O, r]. right: [N, r, I]. ranks: of each
    member; further columns of its left factor are zero. residual: how near the factors are to the members.
    source: where the base comes from. scale: [N, O, 1] or [N, 1, I]; None if no member has scales.
    approximate: whether the factors leave more than rounding. Then `residual.rms` is what they leave, divided
    by the members' differences from the base.
    """

    base: Tensor
    left: Tensor
    right: Tensor
    ranks: list[int]
    residual: Residual
    source: Source
    scale: Tensor | None = None
    approximate: bool = False

    @property
    def rank(self) -> int:
        """The largest rank of a member."""
        return int(self.left.shape[2])

    @property
    def bytes(self) -> int:
        """The bytes of the base, both factors and the scales."""
        parts = (self.base, self.left, self.right, *([] if self.scale is None else [self.scale]))
        return sum(t.numel() * t.element_size() for t in parts)


@dataclass(frozen=True)
class KeptStacked:
    """A weight that stays stacked, since its members are no low-rank fine-tunes of one base.

    reason: in words, for the user. rank: the number of directions that were found above rounding, or None if
    none were sought. residual: what these directions leave, or None.
    """

    reason: str
    rank: int | None = None
    residual: Residual | None = None


def stack_factors(
    pairs: Sequence[tuple[Tensor, Tensor] | None], like: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, list[int]]:
    """Returns the factors of all members, padded with zeros to the largest rank.

    Args:
        pairs: For each member left [O, r] and right [r, I], or None for a member without a difference.
        like: The weight of a member, of the matrix [O, I].
        dtype: Of the factors.

    Returns: left [N, O, r], right [N, r, I], and the rank of each member.
    """
    rows, columns = like.flatten(1).shape
    ranks = [0 if pair is None else pair[0].shape[1] for pair in pairs]
    left = torch.zeros(len(pairs), rows, max(ranks), dtype=dtype)
    right = torch.zeros(len(pairs), max(ranks), columns, dtype=dtype)
    for i, pair in enumerate(pairs):
        if pair is not None:
            left[i, :, : ranks[i]], right[i, : ranks[i]] = pair
    return left, right, ranks
