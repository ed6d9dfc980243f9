"""Rewrites transposed convolutions as convolutions: of stride 1, and of windows that do not overlap.

    y = conv_transpose(x, W; padding p, dilation d)  =  conv(x, W'; padding d * (k - 1) - p, dilation d)
    W: [C, O/g, *k]    W': [O, C/g, *k]

    y = conv_transpose(x, W; stride k)  =  conv(x, W"), with its channels [*k, O] moved into the windows
    W": [k * O, C/g, 1, ..., 1]

1. W' is W with channels exchanged within each group and every spatial dim flipped. W" has one output for each
   number of a window. Both depend on weights alone, so the weight prologue computes them once.
2. The convolution may then use every strategy of convolutions. bench/results/primitives-cpu.json
   (convtranspose1d to 3d) compares the times. A U-Net enlarges its images by windows that do not overlap. One
   such layer as a convolution takes half of the time, for one member and for several.

Requires: a member program with types, and the kinds of its slots.

Leaves alone: convolutions whose output is larger than the input, unless their windows do not overlap, because
the convolution then reads wide margins and may be slower; float64, where it was slower at small sizes; Ragged
weights, which have no prologue; other strides above 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from widepack_artifacts.program import Kind, Node, Program, Ref

from ..ir import ops
from ..ir.edit import NodeWriter, types_of
from ..ir.kinds import kinds, weights_only
from ..ir.tensor_type import TensorType, dtype_in, parse_slot, rank_of

_OPS = {
    "aten.conv_transpose1d.default": 1,
    "aten.conv_transpose2d.input": 2,
    "aten.conv_transpose3d.input": 3,
}
_DTYPES = ("float32", "bfloat16", "float16")


def convolve_plainly(program: Program, slots: Mapping[str, Kind]) -> Program:
    """Returns the program with convolutions in place of transposed convolutions.

    slots: the kinds of weights and inputs, by value name.
    """
    if not any(node.op in _OPS for node in program.nodes):
        return program
    early, kind_of = weights_only(program), kinds(program, slots)
    weights = {
        name: type_
        for name, type_ in types_of(program).items()
        if name in early and kind_of[name] != "ragged" and dtype_in(type_) in _DTYPES
    }
    nodes: list[Node] = []
    for node in program.nodes:
        nodes += (_plain(node, weights) if node.op in _OPS else None) or [node]
    return replace(program, nodes=tuple(nodes))


def _plain(node: Node, weights: dict[str, str]) -> list[Node] | None:
    """Returns the nodes of the new weight and the convolution; None if no convolution is equal."""
    rank = _OPS[node.op]
    bound = ops.bind(node.op, node.args, node.kwargs)
    weight = bound["weight"]
    if not isinstance(weight, Ref) or weight.name not in weights:
        return None
    dims, dtype = parse_slot(weights[weight.name]).dims, dtype_in(weights[weight.name])
    groups = bound.get("groups", 1)
    stride, padding, output_padding, dilation = (
        _numbers(bound.get(k, d), rank)
        for k, d in (("stride", 1), ("padding", 0), ("output_padding", 0), ("dilation", 1))
    )
    if output_padding != [0] * rank or stride is None or padding is None or dilation is None:
        return None
    if not all(type(n) is int and n > 0 for n in dims) or len(dims) != rank + 2 or type(groups) is not int:
        return None
    layer = _TransposedLayer(node, weight, dtype, [int(n) for n in dims], groups)  # type: ignore[arg-type]
    if layer.channels % groups:
        return None
    if stride == [1] * rank:
        return layer.flipped(bound, padding, dilation)
    separate = stride == layer.window and padding == [0] * rank and dilation == [1] * rank
    return layer.separate(bound) if separate and rank_of(node.out) == rank + 2 else None


class _TransposedLayer(NodeWriter):
    """A transposed convolution, and the nodes that replace it.

    outputs: of each group. window: the spatial sizes of the weight.
    """

    def __init__(self, node: Node, weight: Ref, dtype: str, dims: Sequence[int], groups: int) -> None:
        super().__init__(node.name, node.source)
        self.node, self.weight, self.dtype, self.groups = node, weight, dtype, groups
        self.channels, self.outputs, *self.window = dims
        self.rank = len(self.window)

    def flipped(
        self, bound: Mapping[str, Any], padding: Sequence[int], dilation: Sequence[int]
    ) -> list[Node] | None:
        """Returns the nodes for stride 1; None if the convolution would read wide margins."""
        reach = [d * (k - 1) for d, k in zip(dilation, self.window)]
        margin = [r - p for r, p in zip(reach, padding)]
        if min(margin) < 0 or any(2 * m > r for m, r in zip(margin, reach)):
            return None
        exchanged = self._add("exchanged", "transpose.int", self._by_group(), 1, 2)
        weight = self._add("weight", "flatten.using_ints", exchanged, 0, 1)  # [O, C/g, *k]
        weight = self._add("flipped", "flip", weight, list(range(2, self.rank + 2)))
        self._type(self.groups * self.outputs, *self.window)
        ones = [1] * self.rank
        args = (bound["input"], weight, bound.get("bias"), ones, margin, list(dilation), self.groups)
        return [*self.nodes, replace(self.node, op=f"aten.conv{self.rank}d.default", args=args, kwargs={})]

    def separate(self, bound: Mapping[str, Any]) -> list[Node]:
        """Returns the nodes for windows that do not overlap."""
        n, each = self.rank, math.prod(self.window)
        order = [0, *range(3, 3 + n), 2, 1]  # [g, *k, O/g, C/g]
        weight = self._add("turned", "permute", self._by_group(), order)
        weight = self._add("outputs", "flatten.using_ints", weight, 0, n + 1)
        for _ in range(n):
            weight = self._add("weight", "unsqueeze", weight, -1)
        self._type(self.groups * each * self.outputs, *[1] * n)
        bias = bound.get("bias")
        if bias is not None:
            bias = self._add("biases", "unflatten.int", bias, 0, [self.groups, 1, self.outputs])
            bias = self._add("repeated", "expand", bias, [self.groups, each, self.outputs])
            bias = self._add("bias", "flatten.using_ints", bias, 0, 2)
        options = [1] * n, [0] * n, [1] * n, self.groups
        y = self._add("y", f"conv{n}d", bound["input"], weight, bias, *options)
        y = self._add("windows", "unflatten.int", y, 1, [self.groups, *self.window, self.outputs])
        # [B, g, *k, O/g, *s] -> [B, s_1, k_1, s_2, k_2, .., g, O/g]: channels-last memory
        pairs = [d for k in range(n) for d in (3 + n + k, 2 + k)]
        y = self._add("places", "permute", y, [0, *pairs, 1, 2 + n])
        y = self._add("channels", "flatten.using_ints", y, 2 * n + 1, 2 * n + 2)
        for k in reversed(range(n)):
            y = self._add(f"size_{k}", "flatten.using_ints", y, 2 * k + 1, 2 * k + 2)
        args = (y, [0, n + 1, *range(1, n + 1)])
        return [*self.nodes, replace(self.node, op="aten.permute.default", args=args, kwargs={})]

    def _by_group(self) -> Ref:
        """Returns the weight as [g, C/g, O/g, *k]."""
        parts = [self.groups, self.channels // self.groups]
        return self._add("groups", "unflatten.int", self.weight, 0, parts)

    def _add(self, what: str, op: str, *args: Any) -> Ref:
        """Adds a node and returns its value."""
        return self(f"{what}_{len(self.nodes)}", op, *args)

    def _type(self, outputs: int, *window: int) -> None:
        """Notes the type of the new weight, which packing reads."""
        sizes = (outputs, self.channels // self.groups, *window)
        self.typed(Ref(self.nodes[-1].name), TensorType(self.dtype, sizes))


def _numbers(bound: Any, rank: int) -> list[int] | None:
    """Returns one number for each spatial dim; None if one is not static."""
    numbers = list(bound) if isinstance(bound, (list, tuple)) else [bound]
    if not all(type(n) is int for n in numbers):
        return None
    return numbers * rank if len(numbers) == 1 else numbers
