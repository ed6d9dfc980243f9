"""Writes weights of a member program as a base plus a product of thin factors.

    W  becomes  widepack.factored_weight(base, left, right, scale) = (base + left @ right) * scale

1. Each weight whose source has factors becomes slots of its parts: the base, `left`, `right`, and `scale` if
   there is one.
2. One node with the name of the old slot computes the weight. It depends on weights alone, so all other nodes
   stay as they are.

Requires: a functional member program whose weights with factors have at least two dims, the first of them O.
Ensures: equal results except for rounding, if the factors are those of the weights. The result is internal:
no file stores a member program with this op.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from widepack_artifacts.factored import FactoredWeight
from widepack_artifacts.manifest_weights import Weight
from widepack_artifacts.program import Node, Program, Ref, Slot

from ..ir.edit import free_name, types_of
from ..ir.tensor_type import TensorType, parse_slot
from ..kernels.factored import WEIGHT


class FactorNames(NamedTuple):
    """Where the parts of a weight are stored.

    base, left, right: their sources, as in `Slot.source`. rank: the inner size of the product. dtype: the
    dtype of left, right and scale. scale: its source, or "". scale_shape: of one member: (O, 1) or (1, I).
    """

    base: str
    left: str
    right: str
    rank: int
    dtype: str
    scale: str = ""
    scale_shape: tuple[int, ...] = ()

    @property
    def parts(self) -> tuple[str, ...]:
        """The sources of all parts."""
        return (self.base, self.left, self.right, *([self.scale] if self.scale else []))


def with_factors(program: Program, factors: Mapping[str, FactorNames]) -> Program:
    """Returns the program with factored weights in place of the weights that have factors.

    Args:
        program: A member program.
        factors: From the source of a weight to the sources of its parts. A weight whose source is not in it
            stays as it is.

    Returns:
        A member program with slots of the parts for each such weight. The node that computes the weight has
        the name of the old slot. These nodes come first.

    Raises:
        ValueError: A weight with factors has less than two dims, or a size that is no number.
    """
    taken = set(types_of(program))
    weights: list[Slot] = []
    made: list[Node] = []
    for slot in program.weights:
        parts = factors.get(slot.source)
        if parts is None:
            weights.append(slot)
            continue
        sizes = parse_slot(slot.type).numbers
        if sizes is None or len(sizes) < 2:
            raise ValueError(f"weight {slot.source} is {slot.type}; only matrices and filters have factors")
        shapes = {
            "base": slot.type,
            "left": str(TensorType(parts.dtype, (sizes[0], parts.rank))),
            "right": str(TensorType(parts.dtype, (parts.rank, math.prod(sizes[1:])))),
            "scale": str(TensorType(parts.dtype, parts.scale_shape)),
        }
        new = [
            Slot(free_name(f"{slot.name}_{part}", taken), source, slot.kind, shape)
            for (part, shape), source in zip(shapes.items(), parts.parts)
        ]
        weights += new
        made.append(Node(slot.name, WEIGHT, tuple(Ref(s.name) for s in new), {}, slot.type))
    return replace(program, weights=tuple(weights), nodes=(*made, *program.nodes))


def stored_factors(
    factored: Iterable[FactoredWeight], table: Mapping[str, Weight], dtypes: Mapping[str, str] | None = None
) -> dict[str, FactorNames]:
    """Returns the factors of all factored weights, by the weights' names.

    Args:
        factored: The weights.
        table: The stored weights by name.
        dtypes: For each dtype that a load casts the new one. Default: none is cast.
    """
    found = {}
    for w in factored:
        left = table[w.left]
        dtype = (dtypes or {}).get(left.dtype, left.dtype)
        shape = tuple(table[w.scale].shape) if w.scale else ()
        found[w.name] = FactorNames(w.base, w.left, w.right, int(left.shape[1]), dtype, w.scale, shape)
    return found
