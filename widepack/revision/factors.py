"""Revises the weights that are stored as a base and low-rank factors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from widepack_artifacts.factored import FactoredWeight
from widepack_artifacts.manifest import Manifest
from widepack_artifacts.weight_table import Weight, member_tensor
from widepack_artifacts.weights import Weights

from ..building.weight_row import WeightRow
from ..errors import MemberMismatch
from ..fleet.new_members import NewFactors, new_factors
from .slots import MemberSlot

_MOST_NAMED = 5


@dataclass(frozen=True)
class RevisedFactors:
    """A weight of the revised artifact that is stored as factors.

    weight: its row in the manifest. rows: of its base and its factors. corrections: of the members, by the
    names of their tensors.
    """

    weight: FactoredWeight
    rows: list[WeightRow]
    corrections: Mapping[str, bytes]


def revised_factors(manifest: Manifest, files: Weights, slots: Sequence[MemberSlot]) -> list[RevisedFactors]:
    """Returns the factored weights of the revised members. The base stays.

    Raises: MemberMismatch, which lists the weights of new members that are no low-rank fine-tunes of it.
    """
    table = {w.name: w for w in manifest.weights}
    found, bad = [], []
    for weight in manifest.factored.weights:
        try:
            found.append(_revised(weight, table, files, slots))
        except MemberMismatch as error:
            bad.append(str(error))
    if bad:
        more = [f"and {len(bad) - _MOST_NAMED} more weights"] if len(bad) > _MOST_NAMED else []
        raise MemberMismatch("\n".join([*bad[:_MOST_NAMED], *more]))
    return found


def _revised(
    weight: FactoredWeight, table: Mapping[str, Weight], files: Weights, slots: Sequence[MemberSlot]
) -> RevisedFactors:
    new: dict[int, NewFactors] = {
        i: new_factors(weight, files, slot.new, slot.new.checkpoint.path)
        for i, slot in enumerate(slots)
        if slot.new is not None
    }
    left, right = table[weight.left], table[weight.right]
    rank = max([int(left.shape[1]), *(f.left.shape[1] for f in new.values())])
    ranks, corrections = [], {}
    for i, slot in enumerate(slots):
        if slot.old is None:
            one = new[i].rank, new[i].correction
        else:
            one = files.factors_of(weight.name, slot.old)
        ranks.append(one[0])
        if one[1]:
            corrections[member_tensor(weight.name, i)] = one[1]

    def part(name: str, i: int, axis: int | None = None) -> Tensor:
        old = slots[i].old
        value = files.slice(name, old) if old is not None else new[i].parts(weight)[name]
        if axis is None or value.shape[axis] == rank:
            return value
        missing = rank - value.shape[axis]
        shape = list(value.shape)
        shape[axis] = missing
        return torch.cat([value, value.new_zeros(shape)], axis)

    scales = [WeightRow(table[weight.scale], lambda i: part(weight.scale, i))] if weight.scale else []
    return RevisedFactors(
        replace(weight, ranks=ranks),
        [
            WeightRow(table[weight.base], lambda i: files.get(weight.base)),
            WeightRow(replace(left, shape=[left.shape[0], rank]), lambda i: part(weight.left, i, 1)),
            WeightRow(replace(right, shape=[rank, right.shape[1]]), lambda i: part(weight.right, i, 0)),
            *scales,
        ],
        corrections,
    )
