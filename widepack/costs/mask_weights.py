"""Finds the weights of a program that may be masks, or numbers in masks: they reach scores of attention."""

from __future__ import annotations

from math import prod

from widepack_artifacts.program import Program, Slot, refs

from ..ir import ops
from ..ir.encoding import decode
from ..ir.fake_values import CPU
from ..ir.tensor_type import member_types, parse_slot
from .mask_data import MOST_ELEMENTS
from .mask_steps import FOLLOWED, SOFTMAXES, is_attention


def mask_slots(program: Program) -> list[Slot]:
    """Returns the weights of a member program that may be masks, or one number in a mask.

    A mask has at most `MOST_ELEMENTS` elements, and several queries and keys. Only ops which make masks take
    it to a softmax, or to the mask of an attention.
    """
    found = [slot for slot in program.weights if is_number(slot) or _may_be_mask(slot)]
    if not found:
        return []
    reaching: set[str] = set()  # the values that such ops take on to scores
    for node in reversed(program.nodes):
        name = node.op.split(".")[1]
        if name in SOFTMAXES or (name in FOLLOWED and node.name in reaching):
            reaching.update(refs((node.args, node.kwargs)))
        elif is_attention(name):
            bound = ops.bind(node.op, decode(node.args, CPU), decode(node.kwargs, CPU))
            reaching.update(refs(bound.get("attn_mask")))
    return [slot for slot in found if slot.name in reaching]


def is_number(slot: Slot) -> bool:
    """Whether a weight has one element, such as the literal `torch.tensor(float("-inf"))`."""
    sizes = _sizes(slot)
    return sizes is not None and prod(sizes) == 1


def _sizes(slot: Slot) -> tuple[int, ...] | None:
    types = member_types(slot.type)
    return parse_slot(types[0]).numbers if len(types) == 1 else None


def _may_be_mask(slot: Slot) -> bool:
    sizes = _sizes(slot)
    return sizes is not None and len(sizes) > 1 and min(sizes[-2:]) > 1 and prod(sizes) <= MOST_ELEMENTS
