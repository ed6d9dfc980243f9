"""Finds factors that represent a weight up to a declared part of what the fine-tunes change in it.

They are for weights that are no low-rank fine-tunes bit for bit: merged in a shorter dtype than they are
computed in, or fine-tuned as a whole. The members of the artifact then have the weights that the factors
give, and no correction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from widepack_artifacts.correction import StackedFactors, rounded

from .factors import Factors, KeptStacked, Residual, stack_factors
from .low_rank import LowRank, nearest
from .unmerge import most_rank, unfit

SHARE = 2
"""The factors of a weight leave at most the declared part divided by this: errors of all weights add up in an
answer.
"""


def approximate(members: Sequence[Tensor], base: Tensor, tolerance: float) -> Factors | KeptStacked:
    """Returns the factors of the smallest rank that leave a small part of every member's difference.

    Args:
        members: The weight of each member, of one shape and dtype.
        base: The weight of the base.
        tolerance: The declared part of what the fine-tunes change.

    Returns: the factors, or why the weight stays Stacked.

    Raises:
        ValueError: The shapes or dtypes differ.
    """
    first = members[0]
    if any(m.shape != first.shape or m.dtype != first.dtype for m in (*members, base)):
        raise ValueError("the members and the base have other shapes or dtypes")
    if (refused := unfit(members, base)) is not None:
        return refused
    most, share = most_rank(first), tolerance / SHARE
    matrix = base.flatten(1)
    pairs = []
    with torch.no_grad():
        for i, member in enumerate(members):
            difference = member.flatten(1).double() - matrix.double()
            part = nearest(difference, share, most)
            if part is None:
                return KeptStacked(
                    f"the difference of member {i} from the base needs a rank over {most} of"
                    f" {list(matrix.shape)} for the declared tolerance: directions may leave"
                    f" {share:g} of it",
                    most + 1,
                )
            pairs.append(_factors(part, first.dtype))
        return _stacked(members, base, pairs)


def _factors(part: LowRank, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the left and the right factor, in float32 at least."""
    kept = torch.float64 if dtype == torch.float64 else torch.float32
    roots = part.values.sqrt()
    return (part.left * roots).to(kept), (roots.unsqueeze(1) * part.right).to(kept)


def _stacked(
    members: Sequence[Tensor], base: Tensor, pairs: Sequence[tuple[Tensor, Tensor]]
) -> Factors | KeptStacked:
    left, right, ranks = stack_factors(pairs, base, pairs[0][0].dtype)
    if not max(ranks):
        return KeptStacked("no member differs from the base", 0)
    found = StackedFactors(base, left, right, ranks)
    errors = [_part(rounded(found, i), member, base) for i, member in enumerate(members)]
    residual = Residual(max(errors), math.inf)
    return Factors(base, left, right, ranks, residual, "given", approximate=True)


def _part(found: Tensor, member: Tensor, base: Tensor) -> float:
    """Returns the norm of what is left of a member's weight, over that of its difference from the base."""
    whole = float(torch.linalg.vector_norm(member.double() - base.double()))
    return float(torch.linalg.vector_norm(found.double() - member.double())) / whole if whole else 0.0
