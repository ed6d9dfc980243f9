"""Transposed convolutions of stride 1 become convolutions.

    y = conv_transpose(x, W; padding p, dilation d)  =  conv(x, W'; padding d * (k - 1) - p, dilation d)        W: [C, O/g, *k]    W': [O, C/g, *k]

W' is W with channels exchanged within each group and every spatial dim flipped. It depends on weights alone, so the weight prologue makes it once, and every form
that a convolution has is there for it. How that compares stands in
bench/results/primitives-cpu.json (convtranspose1d to 3d).

Where the output is larger than the input, the convolution works on an input with wide margins, and may be slower; in
float64 it was slower at small sizes; a weight whose shape differs by member has no prologue, and would be turned at every call. Those stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from widepack_artifacts.program import Kind, Node, Program, Ref

from ..ir import ops
from ..ir.kinds import kinds, weights_only
from ..spec.input_spec import parse_type

_OPS = {"aten.conv_transpose1d.default": 1, "aten.conv_transpose2d.input": 2, "aten.conv_transpose3d.input": 3}


def convolve_plainly(program: Program, slots: Mapping[str, Kind]) -> Program:
    """The program with convolutions in the place of transposed ones of stride 1 over weights. slots: kinds of weights and inputs by value name."""
    if not any(node.op in _OPS for node in program.nodes):
        return program
    early, found = weights_only(program), kinds(program, slots)
    weights = {s.name: s.type for s in program.weights} | {n.name: n.out for n in program.nodes if n.out and n.name in early}
    weights = {name: type_ for name, type_ in weights.items() if found[name] != "ragged" and type_.startswith("float32[")}
    nodes: list[Node] = []
    for node in program.nodes:
        nodes += (_plain(node, weights) if node.op in _OPS else None) or [node]
    return replace(program, nodes=tuple(nodes))


def _plain(node: Node, weights: dict[str, str]) -> list[Node] | None:
    """The new weight's nodes and the convolution; None where there is none that gives the same."""
    rank = _OPS[node.op]
    given = ops.bind(node.op, node.args, node.kwargs)
    weight = given["weight"]
    if not isinstance(weight, Ref) or weight.name not in weights:
        return None
    dims = parse_type(weights[weight.name])[1]
    groups = given.get("groups", 1)
    stride, padding, more, dilation = (
        _numbers(given.get(k, d), rank) for k, d in (("stride", 1), ("padding", 0), ("output_padding", 0), ("dilation", 1))
    )
    if stride != [1] * rank or more != [0] * rank or padding is None or dilation is None or type(groups) is not int:
        return None
    if not all(type(n) is int and n > 0 for n in dims) or len(dims) != rank + 2:
        return None
    channels, outputs, *window = (int(n) for n in dims)  # type: ignore[arg-type]  # all are int
    reach = [d * (k - 1) for d, k in zip(dilation, window)]
    margin = [r - p for r, p in zip(reach, padding)]
    if min(margin) < 0 or any(2 * m > r for m, r in zip(margin, reach)) or channels % groups:
        return None
    made: list[Node] = []

    def add(what: str, op: str, value: Ref, *args: Any) -> Ref:
        made.append(Node(f"{node.name}_{what}", f"aten.{op}", (value, *args), {}, "", node.source))
        return Ref(made[-1].name)

    split = add("groups", "unflatten.int", weight, 0, [groups, channels // groups])  # [g, C/g, O/g, *k]
    exchanged = add("weight", "flatten.using_ints", add("exchanged", "transpose.int", split, 1, 2), 0, 1)  # [O, C/g, *k]
    flipped = add("flipped", "flip.default", exchanged, list(range(2, rank + 2)))
    sizes = [groups * outputs, channels // groups, *window]
    made[-1] = replace(made[-1], out=f"float32[{','.join(map(str, sizes))}]")
    args = (given["input"], flipped, given.get("bias"), [1] * rank, margin, dilation, groups)
    return [*made, replace(node, op=f"aten.conv{rank}d.default", args=args, kwargs={})]


def _numbers(given: Any, rank: int) -> list[int] | None:
    """One number a spatial dim; None where one is not known."""
    some = list(given) if isinstance(given, (list, tuple)) else [given]
    if not all(type(n) is int for n in some):
        return None
    return some * rank if len(some) == 1 else some
