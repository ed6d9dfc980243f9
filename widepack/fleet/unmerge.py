"""Splits one weight of N members into a base and low-rank factors.

A merged fine-tune is W[i] = round(base + left[i] @ right[i]). The difference from the base has full rank at
the level of rounding only. So the rank is the number of singular values above the edge of rounding noise,
and the factors are taken only if what they leave is rounding, for every member. Where no base is given,
several are tried: a member, and the base that `recovered` finds. The one of the smallest ranks is taken.

`recovered` finds the base of members from the members alone.

With member 0 as a stand-in, D[i] = W[i] - W[0] = L[i] R[i] - L[0] R[0]. The columns of L[0] are in the column
space of every D[i], and the rows of R[0] in every row space. With bases B and A of these common spaces,
Wedderburn's rank reduction gives

    base = W[0] + B M A'    M = (A' D[i]^+ B)^-1

The result has the rounding noise of W[0]. Then these two steps alternate: the low-rank part of each
W[i] - base, and base = mean(W[i] - that part). Each round shrinks the error about as 1/N, and the mean has
less noise than one member.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, islice
from typing import NamedTuple

import torch
from torch import Tensor

from .factors import Factors, KeptStacked, Residual, Source, stack_factors
from .low_rank import DTYPES, MOST_NOISE, LowRank, Noise, cross_rank, improved, low_rank, noise_of, ulps

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


MOST_RANK = 96
"""The largest rank of a member, whatever the weight's size."""
MOST_RMS = 4.0
"""The most that the factors may leave, as `Residual.rms` counts it. Where the merge itself rounded more than
once, this is more than 1; a base with far larger elements than a member is refused.
"""
MOST_ULPS = 2.5
"""The largest difference that the factors may leave, as `Residual.largest` counts it."""
_PAYS = 2  # the factors must be so many times smaller than the stacked weights
_WIDER = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float32: torch.float64,
    torch.float64: torch.float64,
}


class _BaseAndParts(NamedTuple):
    """The members' parts over one base. base: in the members' dtype."""

    base: Tensor
    parts: list[LowRank]
    source: Source

    def cost(self) -> tuple[int, int]:
        return max(part.rank for part in self.parts), sum(part.rank for part in self.parts)


def unmerge(
    members: Sequence[Tensor], base: Tensor | None = None, dtype: torch.dtype | None = None
) -> Factors | KeptStacked:
    """Splits one weight of N members into a base and low-rank factors.

    Args:
        members: The weight of each member, of one shape and dtype.
        base: The weight of the base; None if it is one of the members or unknown.
        dtype: Of the factors. By default the members' dtype. If the factors then leave more than rounding, a
            wider one is taken.

    Returns: the factors, or the reason why the weight stays stacked.

    Raises:
        ValueError: There are no members, or their shapes or dtypes differ.
    """
    if not members:
        raise ValueError("unmerge needs the weights of at least one member")
    first = members[0]
    for i, member in enumerate(members):
        if member.shape != first.shape or member.dtype != first.dtype:
            raise ValueError(
                f"member {i} is {member.dtype} {list(member.shape)}, and member 0 {first.dtype}"
                f" {list(first.shape)}; unmerge takes weights of one shape and dtype"
            )
    if base is not None and base.shape != first.shape:
        raise ValueError(f"the base is {list(base.shape)}, and the members are {list(first.shape)}")
    if (refused := unfit(members, base)) is not None:
        return refused
    with torch.no_grad():
        matrices = [member.detach().flatten(1) for member in members]
        if base is not None:
            given = base.detach().to(first.dtype).flatten(1)
            splits = iter((_over(matrices, given, "given", most_rank(first)),))
        else:
            splits = _sought(matrices)
        first_reason: KeptStacked | None = None
        for split in splits:
            found = (
                _stored(matrices, split, first.shape, dtype) if isinstance(split, _BaseAndParts) else split
            )
            if isinstance(found, Factors):
                return found
            first_reason = first_reason or found
        assert first_reason is not None  # one split at least was tried
        return first_reason


def most_rank(weight: Tensor) -> int:
    """Returns the largest rank at which factors pay for a weight: half of its elements."""
    rows = weight.shape[0]
    columns = weight.numel() // max(1, rows)
    return min(MOST_RANK, rows * columns // (_PAYS * max(1, rows + columns)))


def unfit(members: Sequence[Tensor], base: Tensor | None) -> KeptStacked | None:
    """Returns why a weight of some members cannot have factors, whatever its numbers are; else None."""
    first = members[0]
    if first.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        return KeptStacked(f"it is {str(first.dtype).removeprefix('torch.')}; unmerged are {names}")
    if first.ndim < 2:
        return KeptStacked(f"it has {first.ndim} dims; unmerged are matrices and convolutions")
    if first.numel() == 0:
        return KeptStacked("it has no elements")
    for i, member in enumerate(members):
        if not bool(torch.isfinite(member).all()):
            return KeptStacked(f"member {i} has NaN or infinite elements")
    if base is not None and not bool(torch.isfinite(base).all()):
        return KeptStacked("the base has NaN or infinite elements")
    return None


def _over(matrices: Sequence[Tensor], base: Tensor, source: Source, most: int) -> _BaseAndParts | KeptStacked:
    """Returns the members' parts over a base, if all have a rank of at most `most`."""
    wide = base.double()
    rounded = 2 if source == "recovered" else 1
    parts = []
    for i, matrix in enumerate(matrices):
        difference = matrix.double() - wide
        noise = noise_of(matrix, difference, matrix.dtype, rounded)
        part = low_rank(difference, noise, most, powers_of(matrix.dtype))
        if part is None or part.left_over > MOST_NOISE * noise.rms:
            return _not_low(matrix, difference, i, "the base", most, part)
        parts.append(part)
    return _BaseAndParts(base, parts, source)


def _not_low(
    matrix: Tensor, difference: Tensor, i: int, of: str, most: int, part: LowRank | None
) -> KeptStacked:
    noise = noise_of(matrix, difference, matrix.dtype)
    rank = most + 1 if part is None else part.rank
    left = float(difference.square().mean().sqrt()) if part is None else part.left_over
    limit = "over " if part is None else ""
    sizes = f"[{matrix.shape[0]}, {matrix.shape[1]}]"
    what = "is" if part is None else "leaves"
    return KeptStacked(
        f"the difference of member {i} from {of} has rank {limit}{rank - (part is None)} of {sizes} and"
        f" {what} {left / max(noise.plain, 1e-300):.3g} times the error of rounding: no low-rank fine-tune",
        rank,
        Residual(left / max(noise.plain, 1e-300), float("inf")),
    )


def _sought(matrices: Sequence[Tensor]) -> Iterator[_BaseAndParts | KeptStacked]:
    """Yields the parts over bases that the members themselves give, those of the smallest ranks first."""
    first = matrices[0]
    most = most_rank(first)
    if all(torch.equal(first, other) for other in matrices[1:]):
        yield _over(matrices, first, 0, most)
        return
    found = differences(matrices, min(2 * most, min(first.shape)))
    if isinstance(found, int):
        other = matrices[found]
        yield _not_low(other, other.double() - first.double(), found, "member 0", 2 * most, None)
        return
    bases: list[tuple[Tensor, Source]] = []
    if len(found.parts) >= 2 and (base := recovered(matrices, found)) is not None:
        rounded = base.to(first.dtype)
        if (number := _equal_member(matrices, rounded)) is not None:
            bases.append((matrices[number], number))
        bases.append((rounded, "recovered"))
    for base, source in bases:
        split = _over(matrices, base, source, most)
        if isinstance(split, _BaseAndParts) and split.cost() < _cost_of_first(found):
            yield split
    yield _over(matrices, first, 0, most)


def _cost_of_first(found: MemberDifferences) -> tuple[int, int]:
    ranks = [part.rank for part in found.parts]
    return max(ranks), sum(ranks)


def _equal_member(matrices: Sequence[Tensor], base: Tensor) -> int | None:
    """Returns the member that is nearest to a base, if they differ by no more than rounding."""
    nearest: tuple[float, int] | None = None
    near = 8 if base.dtype == torch.float64 else 2  # in float64 the search itself has such errors
    scale = float(ulps(base, base.dtype).square_().mean().sqrt()) / math.sqrt(12)
    for i, matrix in enumerate(matrices):
        distance = float((matrix.double() - base.double()).square_().mean().sqrt())
        if distance <= near * scale and (nearest is None or distance < nearest[0]):
            nearest = distance, i
    return None if nearest is None else nearest[1]


def _stored(
    matrices: Sequence[Tensor], split: _BaseAndParts, shape: torch.Size, dtype: torch.dtype | None
) -> Factors | KeptStacked:
    """Returns the factors in the dtype in which they are kept, if they then leave no more than rounding."""
    own = matrices[0].dtype
    result: Factors | KeptStacked = KeptStacked("no dtype of factors")
    for kept in dict.fromkeys((dtype,) if dtype is not None else (own, _WIDER[own])):
        pairs = [_rounded(part, kept) for part in split.parts]
        if kept == own == torch.float64:
            pairs = [_polished(m - split.base, *pair) for m, pair in zip(matrices, pairs)]
        residuals = [_residual(m, split.base, left, right) for m, (left, right) in zip(matrices, pairs)]
        worst = Residual(max(r.rms for r, _ in residuals), max(r.largest for r, _ in residuals))
        rank = max(part.rank for part in split.parts)
        bad = next((i for i, (_, good) in enumerate(residuals) if not good), None)
        if bad is None:
            left, right, ranks = stack_factors(pairs, matrices[0], kept)
            return Factors(split.base.reshape(shape).clone(), left, right, ranks, worst, split.source)
        result = KeptStacked(
            f"factors of rank {split.parts[bad].rank} in {str(kept).removeprefix('torch.')} leave"
            f" {residuals[bad][0].rms:.3g} times the error of rounding in member {bad}, at most"
            f" {residuals[bad][0].largest:.3g} ulps (limits {MOST_RMS:g} and {MOST_ULPS:g})",
            rank,
            worst,
        )
    if isinstance(result, KeptStacked) and dtype is not None:
        return replace(result, reason=f"{result.reason}; give a wider dtype of factors")
    return result


def _rounded(part: LowRank, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns both factors in a dtype. The right one is fitted to the left one after that is rounded."""
    roots = part.values.sqrt()
    left = (part.left * roots).to(dtype)
    if not part.rank:
        return left, part.right.to(dtype)
    wide = left.double()
    fit = torch.linalg.solve(wide.t() @ wide, wide.t() @ (part.left * part.values))
    return left, (fit @ part.right).to(dtype)


def _polished(difference: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Returns float64 factors without the error of the decomposition, by one step for each factor."""
    if left.shape[1]:
        right = right + torch.linalg.lstsq(left, difference - left @ right).solution
        left = left + torch.linalg.lstsq(right.t(), (difference - left @ right).t()).solution.t()
    return left, right


def _residual(matrix: Tensor, base: Tensor, left: Tensor, right: Tensor) -> tuple[Residual, bool]:
    """Returns what the factors leave of a member, and whether that is rounding."""
    difference = matrix.double() - base
    noise = noise_of(matrix, difference, matrix.dtype)
    rest = difference.sub_(left.double() @ right.double()).abs_()
    rms = float(rest.square().mean().sqrt())
    spread = torch.maximum(ulps(matrix, matrix.dtype), ulps(base, matrix.dtype))
    typical = max(noise.ulp, noise.rms * math.sqrt(12))
    largest = float((rest / spread.add_(typical)).max())
    found = Residual(rms / noise.plain, largest)
    good = rms <= MOST_NOISE * noise.rms and found.rms <= MOST_RMS and largest <= MOST_ULPS
    return found, good
