"""Rewrites transposed convolutions of stride 1 as convolutions.

    y = conv_transpose(x, W; padding p, dilation d)  =  conv(x, W'; padding d * (k - 1) - p, dilation d)
    W: [C, O/g, *k]    W': [O, C/g, *k]

1. W' is W with channels exchanged within each group and every spatial dim flipped. It depends on weights
   alone, so the weight prologue computes it once.
2. The convolution may then use every strategy of convolutions. bench/results/primitives-cpu.json
   (convtranspose1d to 3d) compares the times.

Requires: a member program with types, and the kinds of its slots.

Leaves alone: convolutions whose output is larger than the input, because the convolution then reads wide
margins and may be slower; float64, where it was slower at small sizes; Ragged weights, which have no
prologue; strides above 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from widepack_artifacts.program import Kind, Node, Program, Ref

from ..ir import ops
from ..ir.kinds import kinds, weights_only
from ..ir.tensor_type import TensorType, dtype_in, parse_slot

_OPS = {
    "aten.conv_transpose1d.default": 1,
    "aten.conv_transpose2d.input": 2,
    "aten.conv_transpose3d.input": 3,
}


def convolve_plainly(program: Program, slots: Mapping[str, Kind]) -> Program:
    """Returns the program with convolutions in place of transposed convolutions of stride 1.

    slots: the kinds of weights and inputs, by value name.
    """
    if not any(node.op in _OPS for node in program.nodes):
        return program
    early, kind_of = weights_only(program), kinds(program, slots)
    weights = {s.name: s.type for s in program.weights} | {
        n.name: n.out for n in program.nodes if n.out and n.name in early
    }
    weights = {
        name: type_
        for name, type_ in weights.items()
        if kind_of[name] != "ragged" and dtype_in(type_) == "float32"
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
    dims = parse_slot(weights[weight.name]).dims
    groups = bound.get("groups", 1)
    stride, padding, output_padding, dilation = (
        _numbers(bound.get(k, d), rank)
        for k, d in (("stride", 1), ("padding", 0), ("output_padding", 0), ("dilation", 1))
    )
    if (
        stride != [1] * rank
        or output_padding != [0] * rank
        or padding is None
        or dilation is None
        or type(groups) is not int
    ):
        return None
    if not all(type(n) is int and n > 0 for n in dims) or len(dims) != rank + 2:
        return None
    channels, outputs, *window = (int(n) for n in dims)  # type: ignore[arg-type]
    reach = [d * (k - 1) for d, k in zip(dilation, window)]
    margin = [r - p for r, p in zip(reach, padding)]
    if min(margin) < 0 or any(2 * m > r for m, r in zip(margin, reach)) or channels % groups:
        return None
    new: list[Node] = []

    def add(what: str, op: str, value: Ref, *args: Any) -> Ref:
        new.append(Node(f"{node.name}_{what}", f"aten.{op}", (value, *args), {}, "", node.source))
        return Ref(new[-1].name)

    split = add("groups", "unflatten.int", weight, 0, [groups, channels // groups])  # [g, C/g, O/g, *k]
    exchanged = add(
        "weight", "flatten.using_ints", add("exchanged", "transpose.int", split, 1, 2), 0, 1
    )  # [O, C/g, *k]
    flipped = add("flipped", "flip.default", exchanged, list(range(2, rank + 2)))
    sizes = [groups * outputs, channels // groups, *window]
    new[-1] = replace(new[-1], out=str(TensorType("float32", tuple(sizes))))
    args = (bound["input"], flipped, bound.get("bias"), [1] * rank, margin, dilation, groups)
    return [*new, replace(node, op=f"aten.conv{rank}d.default", args=args, kwargs={})]


def _numbers(bound: Any, rank: int) -> list[int] | None:
    """Returns one number for each spatial dim; None if one is not static."""
    numbers = list(bound) if isinstance(bound, (list, tuple)) else [bound]
    if not all(type(n) is int for n in numbers):
        return None
    return numbers * rank if len(numbers) == 1 else numbers
