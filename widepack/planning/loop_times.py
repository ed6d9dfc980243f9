"""Predicts the time of a loop over the members, by running the member program on torch's meta device.

A linear layer or a convolution may run over plain weights, or over packed ones, as `lowering/loops.py` writes
them. Packed convolutions read and write channels-last memory, so that all convolutions that can be packed are
packed, or none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from widepack_artifacts.program import Node, Program, Ref, refs, substitute

from ..ir import ops
from ..ir.edit import uses
from ..ir.encoding import decode
from ..ir.kinds import weights_only
from ..ir.limits import tensors as tensors_in
from ..ir.tensor_type import parse_slot
from ..ir.torch_internals import memory_id
from ..kernel_times.call_time import NOTHING, CallTime
from ..kernel_times.cpu import CpuModel
from ..kernels.onednn import PACKED_DTYPES
from ..kernels.packed import ACTIVATIONS
from ..primitives.conv import fixed_numbers
from ..registry.registry import family_of
from ..registry.writer import Writer
from ..runtime.meta_values import META
from ..spec.dtypes import dtype_of
from .plan import NodeChoice
from .regions import Regions
from .strategy_times import PACKED_NUMBER, NodeTimes, TimedCalls, WeightForm

PLAIN, PACKED = "plain weights", "packed"
_LINEAR = "aten.linear.default"
_ACTIVATIONS = {f"aten.{name}.default" for name in ACTIVATIONS if name}


class LoopWalker:
    """Predicts the loop over the members of one program.

    Args:
        regions: The regions of the member program. The time of its Ragged values does not count, because
            they run in a loop always.
        members: N.
        packable: The convolutions that may be packed.
        fixed: The strategies of nodes that are decided already.
        model: The device.
        calls: The calls that were timed before, also by others.
    """

    def __init__(
        self,
        regions: Regions,
        members: int,
        packable: Collection[str],
        fixed: Mapping[str, NodeChoice],
        model: CpuModel,
        calls: TimedCalls,
    ) -> None:
        self._program, self._found, self._members = regions.program, regions.found, members
        self._inside, self._left_out = frozenset(regions.looped), frozenset(regions.ragged)
        self._packable, self._fixed, self._model, self._calls = packable, fixed, model, calls
        self._packs_layers = not regions.plain
        self._early = weights_only(self._program)
        self._results = _read_outside(self._program, self._inside)

    @torch.no_grad()
    def at(self, sizes: Mapping[str, int], *, packed: bool) -> tuple[dict[str, NodeTimes], CallTime]:
        """Returns the times of the nodes for all members, and of what joins their results.

        Args:
            sizes: The size of each dim.
            packed: Whether the convolutions are packed that can be.

        Raises:
            RuntimeError, ValueError, IndexError, TypeError: An op cannot run at these sizes.
        """
        values: dict[str, Any] = {}
        for slot in (*self._program.weights, *self._program.inputs):
            if self._found[slot.name] != "ragged":
                type_ = parse_slot(slot.type)
                values[slot.name] = torch.empty(type_.shape(sizes), dtype=dtype_of(type_.dtype), device=META)
        weights = {memory_id(values[s.name]) for s in self._program.weights if s.name in values}
        found: dict[str, NodeTimes] = {}
        more = NOTHING
        for node in self._program.nodes:
            if node.name in self._left_out or any(r not in values for r in refs((node.args, node.kwargs))):
                continue
            args, kwargs = (
                decode(substitute(a, values.__getitem__), META) for a in (list(node.args), node.kwargs)
            )
            if node.name not in self._inside:
                values[node.name] = self._calls.timed(node.op, args, kwargs, weights)[0]
                if node.name in self._early:
                    weights |= {memory_id(t) for t in tensors_in(values[node.name])}
                continue
            values[node.name], found[node.name], once = self._node(node, args, kwargs, weights, packed)
            more += once
        joined = [t for n in self._results if n in values for t in tensors_in(values[n])]
        copies = self._model.copy(joined).times(self._members)
        for value in joined:
            copies += self._model.new_memory(self._members * value.numel() * value.element_size())
        return found, more + copies

    def _node(
        self, node: Node, args: Any, kwargs: Any, weights: set[int], packed: bool
    ) -> tuple[Any, NodeTimes, CallTime]:
        """Returns the value of a node in the loop, its times, and what it takes once for all members."""
        fixed = self._fixed.get(node.name)
        once, forms = NOTHING, {PLAIN: frozenset[WeightForm]()}
        if packed and fixed is None and node.name in self._packable and "conv1d" not in node.op:
            call, once = self._packed_convolution(node, args, kwargs)
            if call is not None:
                value, time, _ = self._calls.timed(*call, {}, weights)
                forms = {PACKED: frozenset([self._form(call[1][1])])}
                return value, self._times(node, {PACKED: time}, forms), once
        value, time, _ = self._calls.timed(node.op, args, kwargs, weights)
        times = {PLAIN: time}
        if fixed is None and (given := self._packable_layer(node, args, kwargs)) is not None:
            times[PACKED] = self._calls.timed("widepack.inner_product.default", given, {}, weights)[1]
            forms[PACKED] = frozenset([self._form(given[1])])
        return value, self._times(node, times, forms), once

    def _times(
        self, node: Node, times: Mapping[str, CallTime], forms: Mapping[str, frozenset[WeightForm]]
    ) -> NodeTimes:
        every = {name: time.times(self._members) for name, time in times.items()}
        return NodeTimes(every, next(iter(every)), None, family_of(node.op), forms)

    def _form(self, weight: Tensor) -> WeightForm:
        size = self._members * weight.numel() * PACKED_NUMBER
        return WeightForm("a loop's packed weights", tuple(weight.shape), weight.stride(), size)

    def _packable_layer(self, node: Node, args: Any, kwargs: Any) -> list[Any] | None:
        """Returns the arguments of a linear layer over packed weights; None if it cannot run over them."""
        if node.op != _LINEAR or not self._packs_layers:
            return None
        bound, given = (ops.bind(node.op, tuple(a), k) for a, k in ((node.args, node.kwargs), (args, kwargs)))
        name = bound["weight"].name if isinstance(bound["weight"], Ref) else ""
        x, weight, bias = given["input"], given["weight"], given.get("bias")
        if name not in self._early or self._found[name] == "ragged" or weight.dim() != 2:
            return None
        whole = bias is None or list(bias.shape) == [weight.shape[0]]
        known = x.dtype == weight.dtype and weight.dtype in PACKED_DTYPES
        return [x, weight, bias] if whole and known and x.dim() and weight.numel() else None

    def _packed_convolution(
        self, node: Node, args: Any, kwargs: Any
    ) -> tuple[tuple[str, list[Any]] | None, CallTime]:
        """Returns a convolution over packed weights, if it can run over them, and what it takes once."""
        bound, given = (ops.bind(node.op, tuple(a), k) for a, k in ((node.args, node.kwargs), (args, kwargs)))
        x, weight = given["input"], given["weight"]
        if x.dim() != weight.dim():
            return None, NOTHING
        writer = Writer(1, self._model.device)
        writer.op = node.op
        order = [a for a, _, _ in ops.arguments(node.op)]
        rest = [given.get(a, d) for a, _, d in ops.arguments(node.op)[order.index("bias") + 1 :]]
        fixed = fixed_numbers(writer, tuple(rest), {}, tuple(int(s) for s in weight.shape[2:]))
        if fixed is None:
            return None, NOTHING
        once = NOTHING
        if self._found[bound["input"].name] == "shared":  # converted once, not once for each member
            last = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
            once = self._model.copy([x])
            x = x.contiguous(memory_format=last)
        return ("widepack.convolution.default", [x, weight, given.get("bias"), *fixed]), once


def activated_layers(program: Program) -> dict[str, str]:
    """Returns the layers that run the activation after them in place, if they are packed, each with the
    activation: those whose result nothing else reads (`lowering/fusion.py`).
    """
    layers = {n.name for n in program.nodes if n.op == _LINEAR or ".conv" in n.op}
    count = uses(program)
    return {
        n.args[0].name: n.name
        for n in program.nodes
        if n.op in _ACTIVATIONS
        and len(n.args) == 1
        and not n.kwargs
        and isinstance(n.args[0], Ref)
        and n.args[0].name in layers
        and count[n.args[0].name] == 1
    }


def _read_outside(program: Program, inside: Collection[str]) -> list[str]:
    """Returns the values of a loop that nodes after it, or the outputs, read."""
    later = {r for n in program.nodes if n.name not in inside for r in refs((n.args, n.kwargs))}
    later |= {r for o in program.outputs for r in refs(o.value)}
    return [n.name for n in program.nodes if n.name in inside and n.name in later]
