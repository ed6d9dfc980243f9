"""Changes plans for members that train: large linear layers run through oneDNN.

A program with gradients cannot use packed weights, because the weights change at every step. From `LEAST`
multiplications of a member on, `products` calls oneDNN over the plain weights, in the forward pass and in the
backward pass (`kernels/member_products.py`). Its call takes longer to start than a batched product, so
smaller layers keep their strategies. A batch class is divided at the batch from which half of the work in
linear layers is in large ones. From there on a network runs wide if its linear layers have `MOSTLY` times the
multiplications of its convolutions, and it has no recurrent layers: a loop would multiply through torch's own
products, which take up to twice as long.
The limits were measured on one CPU (AMD EPYC, one thread).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from widepack_artifacts.program import Kind, Program, Ref

from ..ir import ops
from ..ir.fake_values import Fakes, replay
from ..ir.kinds import kinds, weights_only
from ..ir.op_records import is_recurrent_layer
from ..kernels.member_products import LEAST, NARROW
from ..runtime.flop_formulas import FORMULAS
from .batch_growth import Growth, at_two_batches
from .plan import REQUESTED, NodeChoice, Plan
from .regions import Regions

PRODUCTS = "products"
_BECAUSE = "a large product of members that train: oneDNN over the plain weights"
_WIDE = "oneDNN computes the large products of all members in less time than a loop over the members saves"
MOSTLY = 4
_LAYER = re.compile(r"aten\.(linear|conv\w*)\.")


def with_products(
    plans: Sequence[Plan],
    program: Program,
    slots: Mapping[str, Kind],
    sizes: Mapping[str, int],
    batch: str,
) -> list[Plan]:
    """Returns the plans of a program with gradients, with `products` for large linear layers on a CPU.

    Args:
        plans: The plans without measurement, smallest batch first.
        program: The member program.
        slots: The kinds of weights and inputs.
        sizes: An example size of each dim.
        batch: The dim that batch classes are made of, or "".
    """
    found = kinds(program, slots)
    measured = at_two_batches(lambda at: _Work.of(program, found, at), sizes, batch)
    requested = (r for p in plans for r in p.regions if r.because == REQUESTED)
    if measured is None or any(region.strategy == "loop" for region in requested):
        return list(plans)
    small, work = measured
    from_ = {name: _large_from(small.layers[name], layer) for name, layer in work.layers.items()}
    at = _divides(work, from_)
    if at is None:
        return list(plans)
    large = {name: NodeChoice(PRODUCTS, _BECAUSE) for name, least in from_.items() if least <= at}
    mostly = sum(layer.multiplications for layer in work.layers.values()) >= MOSTLY * work.others
    changed: list[Plan] = []
    for plan in plans:
        least, most = plan.batch
        if least < at:
            changed.append(replace(plan, batch=(least, at - 1 if most is None else min(most, at - 1))))
        if most is None or most >= at:
            changed.append(_with_large(plan, program, slots, found, large, (max(least, at), most), mostly))
    return changed


def _with_large(
    plan: Plan,
    program: Program,
    slots: Mapping[str, Kind],
    found: Mapping[str, Kind],
    large: Mapping[str, NodeChoice],
    batch: tuple[int, int | None],
    mostly: bool,
) -> Plan:
    """Returns a plan for a batch class of large layers: wide, if these are most of the work."""
    kept = {name: choice for name, choice in plan.choices.items() if choice.requested}
    if plan.looped() and mostly:
        regions = Regions.of(program, found, slots, plan.device, plan.pattern, plan.plain)
        return regions.wide(_WIDE, {**large, **kept}, *batch)
    inside = plan.looped()
    own = {name: choice for name, choice in large.items() if name not in inside}
    return replace(plan, batch=batch, choices={**plan.choices, **own, **kept})


@dataclass(frozen=True)
class _LinearLayer:
    """A linear layer: the rows of a member, and its sizes."""

    rows: int
    inputs: int
    outputs: int

    @property
    def multiplications(self) -> int:
        return self.rows * self.inputs * self.outputs


@dataclass(frozen=True)
class _Work:
    """The multiplications of a member.

    layers: the linear layers whose weights differ between members, by node. others: the multiplications of
    convolutions; infinity for a network with recurrent layers.
    """

    layers: Mapping[str, _LinearLayer]
    others: float

    @classmethod
    def of(cls, program: Program, found: Mapping[str, Kind], sizes: Mapping[str, int]) -> _Work:
        """Computes the work at the given sizes."""
        values, early = replay(program, Fakes(sizes, static=True)), weights_only(program)
        layers, others = {}, 0.0
        for node in program.nodes:
            if node.name in early or found[node.name] != "stacked":
                continue
            if is_recurrent_layer(node.op):
                others = math.inf
            given = ops.bind(node.op, node.args, node.kwargs) if _LAYER.match(node.op) else {}
            weight, y = given.get("weight"), values[node.name]
            if not isinstance(weight, Ref) or not isinstance(y, torch.Tensor):
                continue
            matrix = values[weight.name]
            if ".conv" in node.op:
                operands = {"input": values[given["input"].name], "weight": matrix}
                others += FORMULAS["convolution"](node.op, operands, y) // 2
            elif found[weight.name] == "stacked" and matrix.dim() == 2:
                outputs, inputs = matrix.shape
                layers[node.name] = _LinearLayer(y.numel() // max(1, outputs), inputs, outputs)
        return cls(layers, others)


def _large_from(small: _LinearLayer, layer: _LinearLayer) -> float:
    """Returns the smallest batch at which a layer is large; infinity for none."""
    if min(layer.inputs, layer.outputs) < NARROW:
        return math.inf
    needed = max(NARROW, LEAST / (layer.inputs * layer.outputs))
    return Growth.between(small.rows, layer.rows).smallest(needed)


def _divides(work: _Work, large_from: Mapping[str, float]) -> int | None:
    """Returns the batch from which half of the work in linear layers is in large ones; None for none."""
    total, seen = sum(layer.multiplications for layer in work.layers.values()), 0
    for name in sorted(large_from, key=large_from.__getitem__):
        seen += work.layers[name].multiplications
        if 2 * seen >= total:
            return None if math.isinf(large_from[name]) else int(large_from[name])
    return None
