"""Defines the op `sequence_lengths`: the lengths of packed sequences, after a check of their values.

    sequence_lengths(lengths, steps)    y = lengths, if they descend from at most T to at least 1
    lengths: integers [B], for all members or [N, B]   steps: [T], only its size counts   y: as lengths

Other lengths raise an error, as torch's packing does. A program over padded sequences would answer otherwise.

The ATen form looks up each length at its own place, or outside of the lengths if one of them is wrong.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from widepack_artifacts.errors import some

from .checks.require import OperandError, between, dense, integers, readable, require
from .library import INT64, NodeList, answer_integers, in_aten, own_op

_SHOWN = 8  # lengths in a message
OP = "widepack.sequence_lengths.default"


def _check(lengths: Tensor, steps: Tensor) -> None:
    """Checks the operands: the lengths too, where their values can be read without a wait."""
    integers("lengths", lengths)
    require(lengths.dim() >= 1, "lengths has no dims; 1 is needed")
    dense("steps", steps, 1)
    require(steps.device == lengths.device, f"steps is on {steps.device}; lengths is on {lengths.device}")
    if lengths.device.type != "cpu" or not lengths.numel() or not readable(lengths):
        return
    between("lengths", lengths, 1, steps.shape[0])
    for row in lengths[(lengths[..., 1:] > lengths[..., :-1]).any(-1)].reshape(-1, lengths.shape[-1])[:1]:
        texts = some(row.tolist(), _SHOWN)
        raise OperandError(
            f"lengths is {texts}; pack_padded_sequence with "
            "enforce_sorted=True needs them in descending order"
        )


@own_op(
    "sequence_lengths(Tensor lengths, Tensor steps) -> Tensor",
    lambda lengths, _: lengths.new_empty(lengths.shape),
)
def _sequence_lengths(lengths: Tensor, steps: Tensor) -> Tensor:
    _check(lengths, steps)
    if lengths.device.type == "cpu":
        return lengths.clone(memory_format=torch.contiguous_format)  # the check has read the values
    right = ((lengths >= 1) & (lengths <= steps.shape[0])).all(-1, keepdim=True)
    right = right & (lengths[..., 1:] <= lengths[..., :-1]).all(-1, keepdim=True)
    count = lengths.shape[-1]
    places = torch.where(right, torch.arange(count, device=lengths.device), count)
    return lengths.gather(-1, places.expand(lengths.shape))


def _over_members(
    info: Any, dims: tuple[int | None, ...], lengths: Tensor, steps: Tensor
) -> tuple[Tensor, int]:
    """The op inside `torch.vmap`: it takes a first dim itself, and of the steps it reads only the size."""
    of_lengths, of_steps = dims
    first = lengths.unsqueeze(0) if of_lengths is None else lengths.movedim(of_lengths, 0)
    steps = steps if of_steps is None else steps.select(of_steps, 0)
    return torch.ops.widepack.sequence_lengths.default(
        first.expand(info.batch_size, *first.shape[1:]), steps
    ), 0


answer_integers("sequence_lengths", _over_members)


@in_aten(OP)
def _in_aten(new: NodeList, _: int, lengths: Any, steps: Any) -> None:
    count = new.add("aten.sym_size.int", lengths, -1, suffix="count")
    places = new.add("aten.arange.default", count, suffix="places", **INT64)
    before = new.add("aten.sub.Tensor", places, 1, suffix="before")
    before = new.add("aten.clamp_min.default", before, 0, suffix="first")
    larger = new.add("aten.index_select.default", lengths, -1, before, suffix="larger")  # not B - 1 of them
    ordered = new.add("aten.le.Tensor", lengths, larger, suffix="ordered")
    most = new.add("aten.sym_size.int", steps, 0, suffix="most")
    positive = new.add("aten.ge.Scalar", lengths, 1, suffix="positive")
    inside = new.add("aten.le.Scalar", lengths, most, suffix="inside")
    possible = new.add("aten.logical_and.default", positive, inside, suffix="possible")
    possible = new.add("aten.logical_and.default", possible, ordered, suffix="and_ordered")
    right = new.add("aten.all.dim", possible, -1, True, suffix="right")
    outside = new.add("aten.full_like.default", places, count, suffix="outside")
    chosen = new.add("aten.where.self", right, places, outside, suffix="chosen")
    rows = new.add("aten.expand_as.default", chosen, lengths, suffix="rows")
    new.add("aten.gather.default", lengths, -1, rows, suffix="lengths")
