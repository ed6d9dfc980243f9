"""Finds which pairs of query and key the masks of a program forbid, from sizes and from masks in buffers.

It follows the ops that make masks: `arange`, `//`, comparisons, `and`, `or`, `not`, `tril`, `where`,
`masked_fill` and views. A mask reaches attention as an argument, or written out: a product, the mask, a
softmax, a product. A weight may be a mask too: its data say which pairs it forbids (mask_data.py). What
depends on an input or on another weight is not known. It forbids nothing here, so the pairs that are found
are forbidden at any input.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor

from widepack_artifacts.program import Node, Ref, refs

from ..ir import ops
from ..ir.encoding import decode
from ..ir.fake_values import CPU
from .expressions import World
from .mask_operands import Step
from .mask_steps import MaskStep, is_attention
from .mask_values import Bias, Known, Mask, Scores, forbidden
from .mask_views import without_single
from .pair_boxes import Box, Range
from .pair_regions import NOTHING, Region, complement, count

_PRODUCTS = frozenset(["baddbmm", "bmm", "einsum", "matmul"])
_CAUSAL: Region = (Box(apart=Range(None, sympy.Integer(0))),)
"""The pairs that `is_causal` forbids."""
_MOST_TERMS = 400
"""The most terms of a count. Longer formulas say little, and take long to write."""


@dataclass(frozen=True)
class Masked:
    """The pairs of an attention. forbidden: the number of those that its mask forbids. pairs: of all."""

    forbidden: Any
    pairs: Any


class MaskedPairs:
    """Follows the masks of a program. world: names the dims.

    Attributes:
        found: The pairs of each product of attention, by the name of its node; None where they are unclear.
    """

    def __init__(self, world: World) -> None:
        self.found: dict[str, Masked | None] = {}
        self._world = world
        self._known: dict[str, Known] = {}

    def hold(self, name: str, known: Known) -> None:
        """Notes what is known of a weight of the program."""
        self._known[name] = known

    def pass_on(self, name: str, argument: Any) -> None:
        """Notes that a value of the program is an input of the body of a loop, under another name."""
        self._known[name] = self._known.get(argument.name) if isinstance(argument, Ref) else None

    def note(self, node: Node, values: Mapping[str, Any], result: Any) -> None:
        """Notes what is known of a node's result. values: the symbolic values that it reads, by name."""
        if node.body is not None:
            return
        name = node.op.split(".")[1]
        bound = ops.bind(node.op, decode(node.args, CPU), decode(node.kwargs, CPU))
        step = MaskStep(self._world, self._known, name, bound, values, result)
        self._known[node.name] = None
        if is_attention(name):
            self._attention(node.name, step)
        elif name in _PRODUCTS:
            self._product(node, step)
        elif isinstance(result, Tensor):
            known = step.known()
            if known is not None:
                known = without_single(known, [self._world.expr(size) for size in result.shape])
            self._known[node.name] = known

    def _attention(self, name: str, step: Step) -> None:
        mask = step.value("attn_mask")
        region = NOTHING
        given = step.tensor("attn_mask")
        if isinstance(mask, Mask) and given is not None and given.dtype == torch.bool:
            region = complement(mask.possible) or NOTHING
        elif isinstance(mask, Bias):
            region = mask.forbidden
        elif step.bound.get("is_causal") is True:
            region = _CAUSAL
        query, key = step.tensor("query"), step.tensor("key")
        if region and query is not None and key is not None:
            self._add(name, region, query.shape[-2], key.shape[-2])

    def _product(self, node: Node, step: Step) -> None:
        """Notes a product: of queries and keys, or of the weights of attention and values."""
        added = forbidden(step.value("self")) if step.name == "baddbmm" else NOTHING
        self._known[node.name] = Scores((node.name,), added)
        for name in refs((node.args, node.kwargs)):
            scores = self._known.get(name)
            if isinstance(scores, Scores) and scores.weights and scores.forbidden:
                for product in (*scores.nodes, node.name):
                    self._add(product, scores.forbidden, *step.values[name].shape[-2:])

    def _add(self, name: str, region: Region, queries: Any, keys: Any) -> None:
        rows, columns = self._world.expr(queries), self._world.expr(keys)
        number = _counted(region, rows, columns)
        if number is None or not self._world.is_known(number):
            return
        found = Masked(number, rows * columns)
        # of one product that two softmaxes read, each may forbid other pairs
        self.found[name] = found if self.found.get(name, found) == found else None


def _counted(region: Region, rows: Any, columns: Any) -> Any:
    """Returns the number of pairs of a region, counted by its sets or by those of its complement.

    The fewer sets are tried first. None if the number has no formula of a moderate length.
    """
    rest = complement(region)
    ways = [(len(region), False, region), *([] if rest is None else [(len(rest), True, rest)])]
    for _, is_rest, sets in sorted(ways, key=lambda way: way[:2]):
        number = count(sets, rows, columns)
        if number is not None and len(sympy.Add.make_args(number)) <= _MOST_TERMS:
            return sympy.expand(rows * columns - number) if is_rest else number
    return None
