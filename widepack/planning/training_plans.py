"""Changes plans for members that train: large linear layers run through oneDNN.

A program with gradients cannot use packed weights, because the weights change at every step. From `LEAST`
multiplications of a member on, `products` calls oneDNN over the plain weights, in the forward pass and in the
backward pass (`kernels/member_products.py`). Its call takes longer to start than a batched product, so
smaller layers keep their strategies. A batch class is divided at the batch from which half of the work in
linear layers is in large ones. From there on a network runs wide if its linear layers have `MOSTLY` times the
multiplications of its convolutions, and it has no recurrent layers: a loop would multiply through torch's own
products, which take up to twice as long.
bench/results/products-cpu.json has the times of layers (scripts/measure/products.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from widepack_artifacts.program import Kind, Program, Ref

from ..ir import ops
from ..ir.fake_values import Fakes, replay
from ..ir.kinds import kinds, weights_only
from ..kernels.member_products import LEAST, NARROW
from .plan import REQUESTED, NodeChoice, Plan
from .regions import Regions

PRODUCTS = "products"
_LINEAR = "aten.linear.default"
_BECAUSE = "a large product of members that train: oneDNN over the plain weights"
_WIDE = "oneDNN computes the large products of all members in less time than a loop over the members saves"
MOSTLY = 4
_CONVOLUTION = re.compile(r"aten\.conv\w*\.")
_RECURRENT = re.compile(r"aten\.(lstm|gru|rnn_\w+)\.")


def with_products(
    plans: Sequence[Plan],
    program: Program,
    slots: Mapping[str, Kind],
    sizes: Mapping[str, int],
    batch: str,
) -> list[Plan]:
    """Returns the plans of a program with gradients, with `products` for large linear layers on a CPU.

    Args:
        plans: The plans by rules of thumb, smallest batch first.
        program: The member program.
        slots: The kinds of weights and inputs.
        sizes: An example size of each dim.
        batch: The dim that batch classes are made of, or "".
    """
    found = kinds(program, slots)
    layers = _layers(program, found, sizes, batch)
    at = _divides(layers)
    requested = (r for p in plans for r in p.regions if r.because == REQUESTED)
    if at is None or any(region.strategy == "loop" for region in requested):
        return list(plans)
    large = {name: NodeChoice(PRODUCTS, _BECAUSE) for name, (_, least) in layers.items() if least <= at}
    others = _other_work(program, found, sizes)
    mostly = sum(work for work, _ in layers.values()) * _rate(sizes, batch) >= MOSTLY * others
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


def _rate(sizes: Mapping[str, int], batch: str) -> float:
    """Returns the example's batch as a part of the batch at which `_layers` counts multiplications."""
    return sizes[batch] / 8 if batch else 1.0


def _other_work(program: Program, found: Mapping[str, Kind], sizes: Mapping[str, int]) -> float:
    """Returns the multiplications of a member's convolutions; infinity for recurrent layers."""
    if any(_RECURRENT.match(n.op) for n in program.nodes):
        return math.inf
    nodes = [n for n in program.nodes if _CONVOLUTION.match(n.op) and found[n.name] == "stacked"]
    if not nodes:
        return 0.0
    try:
        values = replay(program, Fakes(sizes, static=True))
    except (DataDependentOutputException, DynamicOutputShapeException, RuntimeError):
        return math.inf
    total = 0.0
    for node in nodes:
        weight = ops.bind(node.op, node.args, node.kwargs).get("weight")
        y, w = values[node.name], values[weight.name] if isinstance(weight, Ref) else None
        if not isinstance(y, torch.Tensor) or not isinstance(w, torch.Tensor):
            return math.inf
        total += y.numel() * w.numel() / max(1, w.shape[0])
    return total


def _divides(layers: Mapping[str, tuple[float, float]]) -> int | None:
    """Returns the batch from which half of the work is in large layers; None if there is none."""
    total, seen = sum(work for work, _ in layers.values()), 0.0
    for work, least in sorted(layers.values(), key=lambda layer: layer[1]):
        seen += work
        if 2 * seen >= total:
            return None if math.isinf(least) else int(least)
    return None


def _layers(
    program: Program, found: Mapping[str, Kind], sizes: Mapping[str, int], batch: str
) -> dict[str, tuple[float, float]]:
    """Returns for each linear layer its multiplications, and the smallest batch at which it is large."""
    early = weights_only(program)
    nodes = [
        n for n in program.nodes if n.op == _LINEAR and n.name not in early and found[n.name] == "stacked"
    ]
    weights = {n.name: ops.bind(n.op, n.args, n.kwargs).get("weight") for n in nodes}
    nodes = [n for n in nodes if isinstance(w := weights[n.name], Ref) and found[w.name] == "stacked"]
    if not nodes:
        return {}
    low, high = {**sizes}, {**sizes}
    if batch:
        low[batch], high[batch] = 4, 8
    try:
        few, many = (replay(program, Fakes(s, static=True)) for s in (low, high))
    except (DataDependentOutputException, DynamicOutputShapeException, RuntimeError, IndexError, ValueError):
        return {}  # sizes that only values determine, or a batch that cannot change alone to these sizes
    layers = {}
    for node in nodes:
        outputs, inputs = few[weights[node.name].name].shape  # type: ignore[union-attr]
        rows = [_rows(values[node.name], outputs) for values in (few, many)]
        needed = max(NARROW, LEAST / max(1, outputs * inputs))
        slope = (rows[1] - rows[0]) / 4
        if min(outputs, inputs) < NARROW or (slope <= 0 and rows[0] < needed):
            least = math.inf
        else:
            least = 1 if slope <= 0 else max(1, math.ceil((needed - rows[0]) / slope + 4))
        layers[node.name] = float(outputs * inputs * rows[1]), least
    return layers


def _rows(value: object, outputs: int) -> int:
    assert isinstance(value, torch.Tensor)
    return value.numel() // max(1, outputs)
