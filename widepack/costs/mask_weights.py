"""Finds the weights of a program that may be masks: buffers that reach the scores of attention."""

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
    """Returns the weights of a member program that may be masks.

    They are tensors of at most `MOST_ELEMENTS` elements whose last two dims have several places, and that
    only ops which make masks take to a softmax or to the mask of an attention.
    """
    found = [slot for slot in program.weights if _may_be_mask(slot)]
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


def _may_be_mask(slot: Slot) -> bool:
    types = member_types(slot.type)
    sizes = parse_slot(types[0]).numbers if len(types) == 1 else None
    return sizes is not None and len(sizes) > 1 and min(sizes[-2:]) > 1 and prod(sizes) <= MOST_ELEMENTS
