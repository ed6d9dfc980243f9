"""Finds the base of members from the members alone.

With member 0 as a stand-in, D[i] = W[i] - W[0] = L[i] R[i] - L[0] R[0]. The columns of L[0] are in the column
space of every D[i], and the rows of R[0] in every row space. With bases B and A of these common spaces,
Wedderburn's rank reduction gives

    base = W[0] + B M A'    M = (A' D[i]^+ B)^-1

The result has the rounding noise of W[0]. Then these two steps alternate: the low-rank part of each
W[i] - base, and base = mean(W[i] - that part). Each round shrinks the error about as 1/N, and the mean has
less noise than one member.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import combinations, islice
from typing import NamedTuple

import torch
from torch import Tensor

from .low_rank import LowRank, cross_rank, improved, low_rank
from .rounding import Noise, noise_of

MOST_MEMBERS = 8
"""More members than these would change a base by less than its rounding."""
_PAIRS = 6  # of members whose ranks are compared
_ROUNDS = 8
_SMALL = 0.02  # a change of the base, in ulps, after which no further round follows


class MemberDifferences(NamedTuple):
    """The low-rank differences of distinct members from the first one.

    first: in float64. others: the numbers of the other members. parts: of W[i] - W[0] for these. noise: of
    the last of them.
    """

    first: Tensor
    others: list[int]
    parts: list[LowRank]
    noise: Noise


def powers_of(dtype: torch.dtype) -> int:
    """Returns how many power iterations a weight of this dtype needs."""
    return 1 if dtype in (torch.float32, torch.float64) else 3


def differences(matrices: Sequence[Tensor], most: int) -> MemberDifferences | int:
    """Returns the differences from member 0, of at most `MOST_MEMBERS` distinct members.

    Returns: the number of a member whose difference has a rank above `most`, if there is one.
    """
    first = matrices[0].double()
    distinct, parts = [matrices[0]], []
    others: list[int] = []
    noise: Noise | None = None
    for i, matrix in enumerate(matrices[1:], 1):
        if len(distinct) == MOST_MEMBERS:
            break
        if any(torch.equal(matrix, other) for other in distinct):
            continue
        difference = matrix.double() - first
        noise = noise_of(matrix, difference, matrix.dtype, rounded=2)
        part = low_rank(difference, noise, most, powers_of(matrix.dtype))
        if part is None:
            return i
        distinct.append(matrix)
        others.append(i)
        parts.append(part)
    assert noise is not None  # the caller has checked that the members differ
    return MemberDifferences(first, others, parts, noise)


def recovered(matrices: Sequence[Tensor], found: MemberDifferences) -> Tensor | None:
    """Returns the base in float64, or None if the members have no common directions beside those of member 0.

    At least two differences are needed.
    """
    shared = _shared_rank(found)
    if shared < 1:
        return None
    columns = _common([part.left for part in found.parts], shared)
    rows = _common([part.right.t() for part in found.parts], shared)
    cores = []
    for part in found.parts:
        inner = (rows.t() @ part.right.t() / part.values) @ (part.left.t() @ columns)
        core, info = torch.linalg.inv_ex(inner)
        if int(info) == 0 and bool(torch.isfinite(core).all()):
            cores.append(core)
    if not cores:
        return None
    core = torch.stack(cores).median(0).values if len(cores) > 2 else cores[0]
    base = found.first + columns @ core @ rows.t()
    return _refined(matrices, found, base, shared, rows)


def _shared_rank(found: MemberDifferences) -> int:
    """Returns the rank of member 0: (rank(D[i]) + rank(D[j]) - rank(D[i] - D[j])) / 2, by the median pair."""
    guesses = [
        (a.rank + b.rank - cross_rank(a, b, found.noise)) / 2
        for a, b in islice(combinations(found.parts, 2), _PAIRS)
    ]
    return min(round(statistics.median(guesses)), *(part.rank for part in found.parts))


def _common(spaces: Sequence[Tensor], count: int) -> Tensor:
    """Returns the directions that the spaces have in common best.

    spaces: orthonormal columns, [M, k] each.
    """
    directions: Tensor = torch.linalg.svd(torch.cat(list(spaces), 1), full_matrices=False).U
    return directions[:, :count]


def _refined(
    matrices: Sequence[Tensor], found: MemberDifferences, base: Tensor, shared: int, rows: Tensor
) -> Tensor:
    """Alternates between the members' low-rank parts and the mean of what they leave."""
    numbers = [0, *found.others]
    ranks = [shared, *(part.rank - shared for part in found.parts)]
    starts = [rows.t(), *(part.right for part in found.parts)]
    for _ in range(_ROUNDS):
        left = torch.zeros_like(base)
        for at, (number, rank) in enumerate(zip(numbers, ranks)):
            difference = matrices[number].double() - base
            left += difference
            if rank:
                part = improved(difference, starts[at], rank)
                starts[at] = part.right
                left -= (part.left * part.values) @ part.right
        left /= len(numbers)
        base = base + left
        if float(left.square_().mean().sqrt()) < _SMALL * found.noise.ulp:
            break
    return base
