"""Finds the convolutions whose weights may be packed."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import Any

from widepack_artifacts.program import Kind, Program, Ref, refs

from ..ir import ops
from ..ir.kinds import weights_only
from ..ir.tensor_type import tensor_type
from .strategy_times import PACKED_NUMBER

PACKED_BYTES = 1 << 30  # the limit of all packed weights together
MOST_PADDED = 4  # a packed weight may take this many times the bytes of the plain weight,
SMALL_BYTES = 4 << 20  # or this many bytes, as for the few channels of a first layer
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""The bytes of a number of a plain weight, by the dtypes that are packed."""
_CONVOLUTION = re.compile(r"aten\.conv[123]d\.(default|padding)")


def packable(program: Program, found: Mapping[str, Kind], members: int) -> set[str]:
    """Returns the convolutions whose weights may be packed.

    A convolution may be packed if it has a dtype that oneDNN packs and no dilation, for which packed
    kernels are slow. No other node may read its weight, which would be packed for each reader. The packed
    weight must not be much larger than the plain one (`_packed_bytes`). All packed weights together must fit
    `PACKED_BYTES`; else the result is empty.
    """
    types = {s.name: s.type for s in program.weights} | {n.name: n.out for n in program.nodes}
    early = weights_only(program)
    readers = Counter(r for n in program.nodes for r in set(refs((n.args, n.kwargs))))
    total, packs = 0, set()
    for node in program.nodes:
        if not _CONVOLUTION.fullmatch(node.op) or found[node.name] != "stacked" or node.name in early:
            continue
        arguments = ops.bind(node.op, node.args, node.kwargs)
        weight = _weight_of(arguments, early, found, readers)
        type_ = tensor_type(types[weight.name]) if weight is not None else None
        if type_ is None or type_.dtype not in _BYTES:  # values that a simplification made have no type
            continue
        sizes = [d for d in type_.sizes if isinstance(d, int)]
        if not _has_packed_kernel(arguments, sizes, found):
            continue
        plain = _BYTES[type_.dtype] * members * math.prod(sizes)
        packed = members * _packed_bytes(sizes, arguments.get("groups", 1))
        if packed > MOST_PADDED * plain and packed > SMALL_BYTES:
            continue
        total += packed
        packs.add(node.name)
    return packs if total <= PACKED_BYTES else set()


def _weight_of(
    arguments: Mapping[str, Any], early: Set[str], found: Mapping[str, Kind], readers: Mapping[str, int]
) -> Ref | None:
    """Returns the weight of a convolution if it is Stacked, depends on weights only, and has one reader."""
    x, weight = arguments["input"], arguments["weight"]
    if not isinstance(x, Ref) or not isinstance(weight, Ref):
        return None
    if weight.name not in early or found[weight.name] != "stacked" or readers[weight.name] > 1:
        return None
    return weight


def _has_packed_kernel(arguments: Mapping[str, Any], sizes: Sequence[int], found: Mapping[str, Kind]) -> bool:
    """Returns whether a packed kernel takes this convolution. `sizes` are those of the weight."""
    groups = arguments.get("groups", 1)
    even = arguments.get("padding") == "same" and any(s % 2 == 0 for s in sizes[2:])
    if not isinstance(groups, int) or _other_than_one(arguments.get("dilation", 1)) or even:
        return False
    return not (found[arguments["input"].name] == "shared" and groups > 1)


def _other_than_one(numbers: Any) -> bool:
    return any(n != 1 for n in (numbers if isinstance(numbers, (list, tuple)) else [numbers]))


def _packed_bytes(sizes: Sequence[int], groups: int) -> int:
    """Returns the bytes of a member's packed weight `[O, C/groups, *k]`.

    The channels of each group are padded to blocks of 16. If each group has one channel, the groups are
    padded instead.
    """
    inputs, outputs = sizes[1], sizes[0] // groups

    def blocks(n: int) -> int:
        return -(-n // 16) * 16

    numbers = blocks(groups) if inputs == outputs == 1 else groups * blocks(inputs) * blocks(outputs)
    return PACKED_NUMBER * numbers * math.prod(sizes[2:])
