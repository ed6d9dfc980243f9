"""Moves linear layers before the reordering of their rows, so that they read rows in memory order.

`linear(transpose(x))` and `linear(reshape(permute(x)))`, as torch's attention writes them, copy every row
into another order first. The result of the layer is often put back in order later.

1. A linear layer behind a chain of reshapes and transposes (view_chains.py) reads the base of the chain
   instead.
2. The order of the chain is applied to the layer's result, where views often cancel.

Requires: a functional member program, and the shapes of its values.

Leaves alone: chains that split, lose or add a part of a base dim, chains that keep the order of rows, and
chains that need a copy behind the layer, unless only other chains read it.
"""

from __future__ import annotations

from dataclasses import replace

from widepack_artifacts.program import Node, Program, Ref

from ..ir.edit import NodeWriter, readers, sweep
from ..ir.fake_values import Shapes
from .view_chains import Chain, link, links


def rows_in_order(program: Program, shapes: Shapes) -> Program:
    """Returns the program with linear layers before the reordering of their rows."""
    values = shapes.of(program)
    by = readers(program)
    chains: dict[str, Chain] = {}
    nodes: list[Node] = []
    for node in program.nodes:
        chain = link(node, chains, values)
        if chain is not None:
            chains[node.name] = chain
        layer = node.op == "aten.linear.default" and isinstance(node.args[0], Ref)
        start = chains.get(node.args[0].name) if layer else None
        free = all(links(n) for n in by.get(node.name, []))
        nodes += (_before(node, start, free) if start else None) or [node]
    return sweep(replace(program, nodes=tuple(nodes)))


def _before(node: Node, chain: Chain, free: bool) -> list[Node] | None:
    """Returns the layer over the chain's base, rows in memory order, then nodes for the chain's order.

    free: whether only other nodes of chains read the layer, so that a copy behind it may cancel.
    """
    order = [i for i, _, _ in chain.atoms]
    size = {i: s for i, s, _ in chain.atoms}
    *leading, row = chain.groups
    chain_order = [i for group in leading for i in group]
    if (
        len(order) != len({d for _, _, d in chain.atoms})
        or any(size[i] == 1 for i in order)
        or not row
        or sorted([*chain_order, *row]) != sorted(order)
    ):
        return None  # a base dim is split, has size 1, or is lost
    memory_order = [i for i in order if i not in row]
    if chain_order == memory_order or (any(len(g) > 1 for g in leading) and not free):
        return None
    write = NodeWriter(node.name, node.source)

    def add(op: str, *args: object) -> Ref:
        return write(f"rows{len(write.nodes)}", op, value, *args)

    value = Ref(chain.base)
    if [*memory_order, *row] != order:
        value = add("permute", [order.index(i) for i in [*memory_order, *row]])
    if len(row) > 1:
        value = add("flatten.using_ints", len(memory_order), -1)
    write.nodes.append(replace(node, name=f"{node.name}_rows", args=(value, *node.args[1:]), out=""))
    value = Ref(f"{node.name}_rows")
    value = add("permute", [*(memory_order.index(i) for i in chain_order), len(chain_order)])
    for at, group in enumerate(leading):
        if not group:
            value = add("unsqueeze", at)
        elif len(group) > 1:
            value = add("flatten.using_ints", at, at + len(group) - 1)
    write.nodes[-1] = replace(write.nodes[-1], name=node.name, out=node.out)
    return write.nodes
