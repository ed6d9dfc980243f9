"""Defines the fleets of a build: what gives the factors of each weight of all members.

`approximate` finds factors that represent a weight up to a declared part of what the fine-tunes change in it.

They are for weights that are no low-rank fine-tunes bit for bit: merged in a shorter dtype than they are
computed in, or fine-tuned as a whole. The members of the artifact then have the weights that the factors
give, and no correction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from widepack_artifacts.correction import StackedFactors, rounded

from ..checkpoints.checkpoint import Checkpoint
from .adapter_members import AdapterMember, fleet_factors
from .factors import Factors, KeptStacked, Residual, stack_factors
from .low_rank import LowRank, nearest, shorter_dtype
from .unmerge import most_rank, unfit, unmerge

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


class AdapterFleet:
    """LoRA adapters over one base.

    exact: whether the factors give the members' weights bit for bit, without corrections.
    """

    exact = True

    def __init__(self, base: Checkpoint, members: Sequence[AdapterMember]) -> None:
        self._base, self._members = base, members

    def factors(self, name: str, member: Callable[[int], Tensor], count: int) -> Factors | KeptStacked:
        """Returns the factors of a weight, or why it stays Stacked.

        member: returns the weight of a member. count: the number of members.
        """
        if name not in self._base.tensors():
            return KeptStacked("the base does not have it")
        found = fleet_factors(name, self._base.get(name), self._members)
        return _if_smaller(found, count) if isinstance(found, Factors) else found


class MergedFleet:
    """Checkpoints that adapters were merged into.

    base: the checkpoint of their base under the model's names; None if it is one of them or unknown.
    tolerance: the part of what the fine-tunes change that factors may leave; None if they may leave rounding
    alone.
    """

    exact = False

    def __init__(self, base: Checkpoint | None, tolerance: float | None = None) -> None:
        self._base, self._tolerance = base, tolerance

    def factors(self, name: str, member: Callable[[int], Tensor], count: int) -> Factors | KeptStacked:
        """Returns the factors that `unmerge` finds, or why the weight stays Stacked."""
        base = None
        if self._base is not None:
            if name not in self._base.tensors():
                return KeptStacked("the base does not have it")
            base = self._base.get(name)
        members = [member(i) for i in range(count)]
        if base is not None and base.shape != members[0].shape:
            return KeptStacked(f"the base has {list(base.shape)}, and the members {list(members[0].shape)}")
        found = unmerge(members, base)
        if isinstance(found, KeptStacked):
            found = _instead(found, members, base, self._tolerance)
        return _if_smaller(found, count) if isinstance(found, Factors) else found


Fleet = AdapterFleet | MergedFleet
"""Fine-tunes of one base: they give the factors of each weight."""


def _instead(
    found: KeptStacked, members: Sequence[Tensor], base: Tensor | None, tolerance: float | None
) -> Factors | KeptStacked:
    """Returns approximate factors if a tolerance is declared; else why the weight stays Stacked."""
    if tolerance is not None and base is not None:
        near = approximate(members, base.to(members[0].dtype), tolerance)
        if isinstance(near, Factors) or near.reason == found.reason:
            return near
        return replace(near, reason=f"{found.reason}; {near.reason}")
    if (short := shorter_dtype(members)) is not None:
        name, wide = (str(d).removeprefix("torch.") for d in (short, members[0].dtype))
        way_out = (
            f"; its numbers were rounded to {name} and are computed in {wide}: give --dtype {name}, the"
            " adapters themselves, or --base with --tolerance"
        )
        return replace(found, reason=f"{found.reason}{way_out}")
    return found


def _if_smaller(found: Factors, count: int) -> Factors | KeptStacked:
    stacked = count * found.base.numel() * found.base.element_size()
    if not found.rank:
        return KeptStacked("no member differs from the base by a low-rank difference", 0)
    if found.bytes >= stacked:
        return KeptStacked(
            f"factors of rank {found.rank} take {found.bytes:,} bytes, and the weights {stacked:,}",
            found.rank,
        )
    return found
