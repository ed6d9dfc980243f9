"""Rewrites chains of reshapes and transposes as views of the value that the chain starts from, and moves
linear layers before the reordering of their rows.

torch's attention writes `[T, B, E] -> [T, B*H, D] -> [B*H, T, D] -> [B, H, T, D]`. These reshapes merge dims
and split them again, and copy where members do not lie next to each other in memory. `unflatten` and one
`permute` compute the same and copy nothing.

1. Each value of a chain is described over the chain's base: `atoms` are the dims of the base, split as far as
   any reshape of the chain splits them, in the base's order. `groups` are the atoms of each dim of the value;
   a dim of size 1 has none.
2. A value whose groups hold one atom each, or neighbours of one base dim, is computed from the base by views
   alone.
3. The pass writes these views for a value behind two reshapes, and for a chain that returns to its base.

Requires: a functional member program, and the shapes of its values. Sizes are compared as symbolic
expressions.

Leaves alone: chains whose sizes do not tell how dims split, and groups of atoms that are not neighbours,
which need a copy.

`linear(transpose(x))` and `linear(reshape(permute(x)))`, as torch's attention writes them, copy every row
into another order first. The result of the layer is often put back in order later. So (`rows_in_order`)

1. a linear layer behind a chain reads the base of the chain instead;
2. the order of the chain is applied to the layer's result, where views often cancel.

It leaves alone chains that split, lose or add a part of a base dim, chains that keep the order of rows, and
chains that need a copy behind the layer, unless only other chains read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch

from widepack_artifacts.program import Node, Program, Ref

from ..ir.edit import VIEWS, NodeWriter, readers, renamed, sweep, with_nodes
from ..ir.fake_values import Shapes
from ..ir.values import expression

_RESHAPES = {"aten.reshape.default", *VIEWS, "aten.flatten.using_ints", "aten.unflatten.int"}
_ORDERS = {"aten.transpose.int", "aten.permute.default", "aten.unsqueeze.default", "aten.squeeze.dim"}


@dataclass(frozen=True)
class Chain:
    """Describes a value of a chain over the chain's base.

    base: the value that the chain starts from.
    atoms: (id, size, base dim), in the base's order.
    groups: for each dim of the value the ids of its atoms.
    reshapes: the number of reshapes between the base and the value.
    """

    base: str
    atoms: tuple[tuple[int, Any, int], ...]
    groups: tuple[tuple[int, ...], ...]
    reshapes: int = 0

    def size(self, atom: int) -> Any:
        """Returns the size of an atom."""
        return next(s for i, s, _ in self.atoms if i == atom)


def merge_views(program: Program, shapes: Shapes) -> Program:
    """Returns the program with chains as views, where views are enough."""
    values = shapes.of(program)
    chains: dict[str, Chain] = {}
    kept: list[Node] = []
    to: dict[str, Any] = {}
    for node in program.nodes:
        chain = link(node, chains, values)
        if chain is not None:
            chains[node.name] = chain
            after_two_reshapes = chain.reshapes > 1 and node.op in _RESHAPES
            returns = node.op in _ORDERS and _returns_to_base(chain)
            views = _views(node, chain) if after_two_reshapes or returns else None
            if views is not None:
                kept += views
                if not views:
                    to[node.name] = Ref(chain.base)
                continue
        kept.append(renamed(node, to))
    return sweep(with_nodes(program, kept, to))


def links(node: Node) -> bool:
    """Whether the node can be part of a chain: it reshapes or reorders dims and keeps the numbers."""
    return node.op in _RESHAPES | _ORDERS


def _returns_to_base(chain: Chain) -> bool:
    """Whether the value of the chain equals its base."""
    return list(chain.groups) == [(i,) for i, _, _ in chain.atoms] and not any(
        s == 1 for _, s, _ in chain.atoms
    )


def link(node: Node, chains: Mapping[str, Chain], values: Mapping[str, Any]) -> Chain | None:
    """Returns the description of a node's value, if the node is part of a chain."""
    if not links(node) or not isinstance(node.args[0], Ref):
        return None
    source = node.args[0].name
    if not isinstance(values[source], torch.Tensor):
        return None
    shape = [expression(s) for s in values[source].shape]
    start = chains.get(source) or Chain(
        source,
        tuple((i, s, i) for i, s in enumerate(shape)),
        tuple((i,) if s != 1 else () for i, s in enumerate(shape)),
    )
    rank = len(start.groups)
    groups = list(start.groups)
    if node.op in _RESHAPES:
        return _regroup(start, [expression(s) for s in values[node.name].shape])
    if rank == 0 and node.op != "aten.unsqueeze.default":
        return start  # a 0-dim value has no dims to move, whatever dims the op names
    if node.op == "aten.transpose.int":
        a, b = node.args[1] % rank, node.args[2] % rank
        groups[a], groups[b] = groups[b], groups[a]
    elif node.op == "aten.permute.default":
        groups = [groups[d % rank] for d in node.args[1]]
    elif node.op == "aten.unsqueeze.default":
        groups.insert(node.args[1] % (rank + 1), ())
    else:
        if any(not start.size(i).is_Integer for i in groups[node.args[1] % rank]):
            return None  # squeeze would remove the dim only in calls where its size is 1
        if groups[node.args[1] % rank]:
            return start  # the size is not 1, so squeeze does nothing
        del groups[node.args[1] % rank]
    return replace(start, groups=tuple(groups))


def _regroup(start: Chain, shape: list[Any]) -> Chain | None:
    """Distributes the atoms over the dims of another shape, and splits an atom where a dim ends inside it.

    None where the sizes do not tell how.
    """
    atoms = {i: (size, dim) for i, size, dim in start.atoms}
    order = [i for i, _, _ in start.atoms]
    waiting = [i for group in start.groups for i in group]
    groups: list[tuple[int, ...]] = []
    for size in shape:
        group: list[int] = []
        room = size
        while room != 1:
            if not waiting:
                return None
            i = waiting.pop(0)
            have, dim = atoms[i]
            if sympy.denom(rest := sympy.cancel(room / have)) == 1:
                group.append(i)
                room = rest
                continue
            other = sympy.cancel(have / room)
            if sympy.denom(other) != 1 or (other.free_symbols and room.free_symbols):
                return None
            new = max(atoms) + 1
            atoms[new], atoms[new + 1] = (room, dim), (other, dim)
            at = order.index(i)
            order[at : at + 1] = [new, new + 1]
            group.append(new)
            waiting.insert(0, new + 1)
            room = sympy.Integer(1)
            if any(i in g for g in groups):
                return None
        groups.append(tuple(group))
    if any(atoms[i][0] != 1 for i in waiting):
        return None
    return Chain(start.base, tuple((i, *atoms[i]) for i in order), tuple(groups), start.reshapes + 1)


def _views(node: Node, chain: Chain) -> list[Node] | None:
    """Returns nodes that compute the value from the base by views alone; None where a copy is needed."""
    order = [i for i, _, _ in chain.atoms]
    parts = _parts_of_base(chain, order)
    splits = None if parts is None else _splits(chain, parts, order)
    if splits is None:
        return None
    write = NodeWriter(node.name, node.source)
    value = Ref(chain.base)
    layout: list[tuple[int, ...]] = []  # the atoms of each dim of `value`
    for dim, groups, sizes in splits:
        if len(groups) > 1:
            value = write(f"part{dim}", "unflatten.int", value, len(layout), sizes)
        layout += groups or [()]
    target = [g for g in chain.groups if g]
    ones = [i for i, g in enumerate(layout) if not g]
    permutation = [layout.index(g) for g in target] + ones
    if permutation != list(range(len(layout))):
        value = write("order", "permute", value, permutation)
    if ones:
        value = write("drop", "squeeze.dims", value, list(range(len(target), len(layout))))
    for at, group in enumerate(chain.groups):
        if not group:
            value = write(f"one{at}", "unsqueeze", value, at)
    if write.nodes:
        write.nodes[-1] = replace(write.nodes[-1], name=node.name, out=node.out)
    return write.nodes


def _parts_of_base(chain: Chain, order: list[int]) -> dict[int, list[tuple[int, ...]]] | None:
    """Returns the groups in each base dim; None if an atom is lost, or if a group needs a copy."""
    base_dim = {i: d for i, _, d in chain.atoms}
    if sorted(i for g in chain.groups for i in g) != sorted(i for i, size, _ in chain.atoms if size != 1):
        return None
    parts: dict[int, list[tuple[int, ...]]] = {}
    for group in filter(None, chain.groups):
        positions = [order.index(i) for i in group]
        if positions != list(range(positions[0], positions[0] + len(positions))):
            return None
        if len({base_dim[i] for i in group}) > 1:
            return None
        parts.setdefault(base_dim[group[0]], []).append(group)
    return parts


def _splits(
    chain: Chain, parts: Mapping[int, list[tuple[int, ...]]], order: list[int]
) -> list[tuple[int, list[tuple[int, ...]], list[int]]] | None:
    """Returns each base dim with its groups, in the base's order, and their sizes; -1 is an unknown size.

    None if a dim has two groups of unknown size, which `unflatten` does not take.
    """
    splits = []
    for dim in sorted({d for _, _, d in chain.atoms}):
        groups = sorted(parts.get(dim, []), key=lambda g: order.index(g[0]))
        products = [sympy.prod([chain.size(i) for i in g]) for g in groups]
        sizes = [int(p) if p.is_Integer else -1 for p in products]
        if len(groups) > 1 and sizes.count(-1) > 1:
            return None
        splits.append((dim, groups, sizes))
    return splits


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
