"""Defines the fleets of a build: what gives the factors of each weight of all members."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from ..checkpoints.checkpoint import Checkpoint
from .adapter_members import AdapterMember, fleet_factors
from .approximate import approximate
from .factors import Factors, KeptStacked
from .rounding import shorter_dtype
from .unmerge import unmerge


class Fleet(Protocol):
    """Fine-tunes of one base.

    exact: whether the factors give the members' weights bit for bit, without corrections.
    """

    @property
    def exact(self) -> bool: ...

    def factors(self, name: str, member: Callable[[int], Tensor], count: int) -> Factors | KeptStacked:
        """Returns the factors of a weight, or why it stays Stacked.

        member: returns the weight of a member. count: the number of members.
        """


class AdapterFleet:
    """LoRA adapters over one base."""

    exact = True

    def __init__(self, base: Checkpoint, members: Sequence[AdapterMember]) -> None:
        self._base, self._members = base, members

    def factors(self, name: str, member: Callable[[int], Tensor], count: int) -> Factors | KeptStacked:
        """Returns the factors of the adapters, or why the weight stays Stacked."""
        if name not in self._base.tensors():
            return KeptStacked("the base does not have it")
        found = fleet_factors(name, self._base.get(name), self._members)
        if found is None:
            return KeptStacked(_why_whole(name, self._base.get(name), self._members))
        return _if_smaller(found, count)


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


def _why_whole(name: str, base: Tensor, members: Sequence[AdapterMember]) -> str:
    """Returns why a weight of adapters has no factors."""
    if base.ndim < 2:
        return f"it has {base.ndim} dims; factored are matrices and filters"
    if any(m.replaces(name) for m in members):
        return "an adapter replaces it"
    return "the adapters have scales of different dims (DoRA)"


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
