"""Linear layers take their rows in the order in which they lie in memory.

`linear(transpose(x))` and `linear(reshape(permute(x)))`, as torch's own attention writes them, copy every row into another order first, and the layer's
answer is put back in order after. A linear layer does not mind the order of rows: it runs on the value that the chain starts from, and the order is
changed behind it, where views often cancel (views.py).
"""

from __future__ import annotations

from dataclasses import replace

from widepack_artifacts.program import Node, Program, Ref

from ..ir.edit import readers, sweep
from ..ir.fake_values import Shapes
from .view_chains import Chain, link, links


def rows_in_order(program: Program, shapes: Shapes) -> Program:
    """The program with linear layers before the reordering of their rows."""
    values = shapes.of(program)
    by = readers(program)
    chains: dict[str, Chain] = {}
    nodes: list[Node] = []
    for node in program.nodes:
        chain = link(node, chains, values)
        if chain is not None:
            chains[node.name] = chain
        start = chains.get(node.args[0].name) if node.op == "aten.linear.default" and isinstance(node.args[0], Ref) else None
        free = all(links(n) for n in by.get(node.name, []))
        nodes += (_before(node, start, free) if start else None) or [node]
    return sweep(replace(program, nodes=tuple(nodes)))


def _before(node: Node, chain: Chain, free: bool) -> list[Node] | None:
    """The layer on the chain's base with its rows in the base's order, then the order that was asked for. free: a copy behind the layer is seen by other links alone."""
    order = [i for i, _, _ in chain.atoms]
    size = {i: s for i, s, _ in chain.atoms}
    *leading, row = chain.groups
    asked = [i for group in leading for i in group]
    if len(order) != len({d for _, _, d in chain.atoms}) or any(size[i] == 1 for i in order) or not row or sorted([*asked, *row]) != sorted(order):
        return None  # a base dim that is parted, or of size 1, or lost
    lying = [i for i in order if i not in row]
    if asked == lying or (any(len(g) > 1 for g in leading) and not free):
        return None
    made: list[Node] = []
    value = Ref(chain.base)

    def add(op: str, *args: object) -> Ref:
        made.append(Node(f"{node.name}_rows{len(made)}", f"aten.{op}", (value, *args), {}, "", node.source))
        return Ref(made[-1].name)

    if [*lying, *row] != order:
        value = add("permute.default", [order.index(i) for i in [*lying, *row]])
    if len(row) > 1:
        value = add("flatten.using_ints", len(lying), -1)
    made.append(replace(node, name=f"{node.name}_rows", args=(value, *node.args[1:]), out=""))
    value = Ref(made[-1].name)
    value = add("permute.default", [*(lying.index(i) for i in asked), len(asked)])
    for at, group in enumerate(leading):
        if not group:
            value = add("unsqueeze.default", at)
        elif len(group) > 1:
            value = add("flatten.using_ints", at, at + len(group) - 1)
    made[-1] = replace(made[-1], name=node.name, out=node.out)
    return made
