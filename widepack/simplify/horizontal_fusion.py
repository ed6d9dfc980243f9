"""Joins narrow linear layers over one value into one layer, for example several heads.

    y1 = x W1^T + b1, y2 = x W2^T + b2    becomes    [y1, y2] = x [W1; W2]^T + [b1; b2]

1. Layers over one value are grouped by dtype, width of the input, and the kinds of weight and bias.
2. New nodes compute the joint weight and bias. They depend on weights alone, so the weight prologue runs them
   once. A layer without a bias gets zeros if another layer of its group has one.
3. One layer runs, and views of its result replace the results of the group.

Requires: a functional member program and the kinds of its slots. Ensures: no kind rises, because Shared
weights are
joined only with Shared ones and Stacked weights with Stacked ones, biases likewise.

Leaves alone: layers with more than `NARROW` outputs, layers over weights alone, layers
with factored weights, whose products would be lost, and Ragged layers.

Speed against the separate layers, on a CPU with one thread, N = 4 to 50: five heads of 10 outputs 1.6x, four
of 16 1.1-1.25x; Q, K and V of 64 outputs 0.98-1.05x, of 256 0.94-1.16x, of 768 0.77-0.99x; gate and up of 512
0.82-0.97x. A product with many outputs is as fast alone, and the readers of its parts then read memory with
gaps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from widepack_artifacts.program import Kind, Node, Program, Ref

from ..ir import ops
from ..ir.edit import NodeWriter, types_of, with_nodes
from ..ir.kinds import kinds, weights_only
from ..ir.tensor_type import tensor_type
from ..kernels.factored import WEIGHT

NARROW = 32


@dataclass(frozen=True)
class _Layer:
    """A linear layer that may be joined.

    bias: None if it has no bias. width: the number of outputs. group: layers with equal groups are joined.
    """

    node: Node
    weight: Ref
    bias: Ref | None
    width: int
    group: tuple[str, ...]


def join_siblings(program: Program, slots: Mapping[str, Kind]) -> Program:
    """Returns the program with narrow linear layers over one value joined into one."""
    kind_of, early = kinds(program, slots), weights_only(program)
    types = types_of(program)
    factored = {n.name for n in program.nodes if n.op == WEIGHT}
    groups: dict[tuple[str, ...], list[_Layer]] = {}
    for node in program.nodes:
        layer = _layer(node, kind_of, early - factored, types)
        if layer is not None:
            groups.setdefault(layer.group, []).append(layer)
    joined = {g[0].node.name: g for g in groups.values() if len(g) > 1}
    if not joined:
        return program
    replaced = {layer.node.name for g in joined.values() for layer in g}
    # Nodes over weights alone come first, because the first layer of a group needs the joint weight.
    kept = [n for n in program.nodes if n.name in early]
    for node in program.nodes:
        if node.name in joined:
            kept += _join(joined[node.name])
        elif node.name not in replaced and node.name not in early:
            kept.append(node)
    return with_nodes(program, kept, {})


def _layer(
    node: Node, kind_of: Mapping[str, Kind], early: set[str], types: Mapping[str, str]
) -> _Layer | None:
    if node.op != "aten.linear.default" or node.name in early or kind_of[node.name] == "ragged":
        return None
    bound = ops.bind(node.op, node.args, node.kwargs)
    x, weight, bias = bound["input"], bound["weight"], bound.get("bias")
    parameters = [weight] if bias is None else [weight, bias]
    if not isinstance(x, Ref) or not all(isinstance(p, Ref) and p.name in early for p in parameters):
        return None
    found = [tensor_type(types[p.name]) for p in parameters]
    type_ = found[0]
    if type_ is None or found[-1] is None or len(type_.sizes) != 2:
        return None
    width, inner = type_.sizes
    if not isinstance(width, int) or width > NARROW:
        return None
    if bias is not None and found[-1].sizes != (width,):  # it broadcasts
        return None
    # A layer without a bias counts as one with a bias of the weight's kind: its zeros have that kind.
    kind, bias_kind = kind_of[weight.name], kind_of[parameters[-1].name]
    return _Layer(node, weight, bias, width, (x.name, type_.dtype, str(inner), kind, bias_kind))


def _join(group: Sequence[_Layer]) -> list[Node]:
    first = group[0].node
    write = NodeWriter(f"{first.name}_joint", first.source)
    weight, bias = write("weight", "cat", [g.weight for g in group], 0), None
    if any(g.bias for g in group):
        parts = [g.bias or write(f"zeros{i}", "new_zeros", g.weight, [g.width]) for i, g in enumerate(group)]
        bias = write("bias", "cat", parts, 0)
    widths = [g.width for g in group]
    rows = write("rows", "linear", first.args[0], weight, bias)
    type_ = tensor_type(first.out)
    if type_ is not None and type_.sizes:
        write.typed(rows, type_.with_sizes([*type_.sizes[:-1], sum(widths)]))
    split = write("parts", "split_with_sizes", rows, widths, -1)
    items = (replace(g.node, op="operator.getitem", args=(split, i), kwargs={}) for i, g in enumerate(group))
    return [*write.nodes, *items]
