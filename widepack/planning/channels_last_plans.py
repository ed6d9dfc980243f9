"""Changes plans for members that train: convolutions run in channels-last memory on a CPU.

torch's pooling, its norms and oneDNN's convolutions read the channels of a pixel together. In torch's own
order, `max_pool2d` takes about 15 times as long, and grouped convolutions are reordered at each call. The
first convolution puts its input into channels-last memory, and what follows keeps this order.

The weights change at every step, so each step reorders them, too. A convolution whose weight has more numbers
than its input and its answer together keeps its strategy, and so does one of 16 bits with an odd number of
channels, whose kernels would read channels of the next member. So do all convolutions of a program that reads
numbers of another dtype from memory. For inference, weights are packed instead (`packed_convs.py`). Programs
that torch compiles keep torch's own order, because its compiler chooses one itself.

So do convolutions that may read one image, and calls whose batch is 1 take a plan `without_channels_last`.
The memory order of one image is ambiguous after a view, and torch then reads a gradient in one order that is
in the other: batch norms and instance norms of one sample give wrong gradients.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from widepack_artifacts.program import Kind, Program, Ref

from ..ir import ops
from ..ir.edit import DENSE
from ..ir.fake_values import Fakes, replay
from ..ir.kinds import kinds, weights_only
from ..ir.tensor_type import tensor_type
from ..kernels.onednn import reads_beyond
from .plan import NodeChoice, Plan

CHANNELS_LAST = "grouped_channels_last"
_BECAUSE = "of members that train: pooling, norms and oneDNN are fastest in channels-last memory"
_CONVOLUTION = re.compile(r"aten\.conv[23]d\.(default|padding)")


def with_channels_last(
    plans: Sequence[Plan], program: Program, slots: Mapping[str, Kind], sizes: Mapping[str, int], batch: str
) -> list[Plan]:
    """Returns the plans of a program with gradients, with channels-last convolutions on a CPU.

    They are for calls whose batch is 2 or more.

    Args:
        plans: The plans, smallest batch first.
        program: The member program.
        slots: The kinds of weights and inputs.
        sizes: An example size of each dim.
        batch: The dim of the batch.
    """
    found = kinds(program, slots)
    many = _many_images(program, batch)
    large = [name for name in _large_images(program, found, sizes) if name in many]
    changed = []
    for plan in plans:
        own = {name: NodeChoice(CHANNELS_LAST, _BECAUSE) for name in large if name not in plan.choices}
        safe = {k: c for k, c in plan.choices.items() if c.strategy != CHANNELS_LAST or k in many}
        changed.append(replace(plan, choices={**safe, **own}))
    return changed


def without_channels_last(plan: Plan) -> Plan:
    """Returns the plan for a batch of one: the same plan if no convolution is in channels-last memory."""
    choices = {k: c for k, c in plan.choices.items() if c.strategy != CHANNELS_LAST}
    return plan if len(choices) == len(plan.choices) else replace(plan, choices=choices)


def _many_images(program: Program, batch: str) -> set[str]:
    """Returns the convolutions that provably read several images in every call whose batch is 2 or more."""
    types = {s.name: s.type for s in (*program.inputs, *program.weights)}
    types.update((n.name, n.out) for n in program.nodes)
    names = set()
    for node in program.nodes:
        if not _CONVOLUTION.fullmatch(node.op):
            continue
        given = ops.bind(node.op, node.args, node.kwargs)["input"]
        x = tensor_type(types.get(given.name, ""))
        if x is None or len(x.sizes) != int(node.op[len("aten.conv")]) + 2:  # one image has no batch
            continue
        factors = str(x.sizes[0]).split("*")
        numbers = [int(f) for f in factors if f.isdecimal()]
        known = 0 not in numbers and all(f.isdecimal() or f.isidentifier() for f in factors)
        if known and (batch in factors or any(n > 1 for n in numbers)):
            names.add(node.name)
    return names


def _large_images(program: Program, found: Mapping[str, Kind], sizes: Mapping[str, int]) -> list[str]:
    """Returns the convolutions with more numbers in their input and answer than in their weight."""
    nodes = [n for n in program.nodes if _CONVOLUTION.fullmatch(n.op) and found[n.name] == "stacked"]
    if not nodes or any(n.op in DENSE for n in program.nodes):
        return []
    try:
        values = replay(program, Fakes(sizes, static=True))
    except (DataDependentOutputException, DynamicOutputShapeException):
        return []  # a size depends on values
    early, names = weights_only(program), []
    for node in nodes:
        given = ops.bind(node.op, node.args, node.kwargs)
        x, weight = (values[v.name] if isinstance(v := given[k], Ref) else None for k in ("input", "weight"))
        y = values[node.name]
        tensors = (x, weight, y)
        if node.name in early or not all(isinstance(v, torch.Tensor) for v in tensors):
            continue
        leaks = reads_beyond(weight.dtype, int(weight.shape[1]))  # type: ignore[union-attr]
        if not leaks and x.numel() + y.numel() >= weight.numel():  # type: ignore[union-attr]
            names.append(node.name)
    return names
