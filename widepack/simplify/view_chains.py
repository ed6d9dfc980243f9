"""Chains of reshapes and transposes that merge dims only to part them again.

`[T, B, E] -> [T, B*H, D] -> [B*H, T, D] -> [B, H, T, D]`, as torch's own attention writes it, copies where members do not lie next to each other in memory;
`unflatten` and one `permute` say the same and copy nothing. Each value of a chain is described over the chain's base:

    atoms    the base's dims, parted as far as any reshape of the chain parts them, in the base's order
    groups   for each dim of the value the atoms that it is made of; none for a dim of size 1

A value whose groups hold one atom each, or neighbours of one base dim, is made from the base by views alone. Sizes are compared as symbolic expressions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch

from widepack_artifacts.program import Node, Program, Ref

from ..ir.edit import renamed, sweep, with_nodes
from ..ir.fake_values import Shapes
from ..ir.values import expression

_RESHAPES = {"aten.reshape.default", "aten.view.default", "aten._unsafe_view.default", "aten.flatten.using_ints", "aten.unflatten.int"}
_ORDERS = {"aten.transpose.int", "aten.permute.default", "aten.unsqueeze.default", "aten.squeeze.dim"}


@dataclass(frozen=True)
class Chain:
    """base: the value that the chain starts from. atoms: (id, size, base dim) in the base's order. groups: ids by dim. reshapes: how many lie on the way."""

    base: str
    atoms: tuple[tuple[int, Any, int], ...]
    groups: tuple[tuple[int, ...], ...]
    reshapes: int = 0

    def size(self, atom: int) -> Any:
        return next(s for i, s, _ in self.atoms if i == atom)


def merge_views(program: Program, shapes: Shapes) -> Program:
    """The program with chains that come down to views written as such."""
    values = shapes.of(program)
    chains: dict[str, Chain] = {}
    kept: list[Node] = []
    to: dict[str, Any] = {}
    for node in program.nodes:
        chain = link(node, chains, values)
        if chain is not None:
            chains[node.name] = chain
            made = _views(node, chain) if (chain.reshapes > 1 and node.op in _RESHAPES) or (node.op in _ORDERS and _nothing(chain)) else None
            if made is not None:
                kept += made
                if made[-1].name != node.name if made else True:
                    to[node.name] = Ref(made[-1].name if made else chain.base)
                continue
        kept.append(renamed(node, to))
    return sweep(with_nodes(program, kept, to))


def links(node: Node) -> bool:
    """Whether the node is a link of a chain: it moves dims about and leaves what they hold."""
    return node.op in _RESHAPES | _ORDERS


def _nothing(chain: Chain) -> bool:
    """Whether the chain ends where it began."""
    return list(chain.groups) == [(i,) for i, _, _ in chain.atoms] and not any(s == 1 for _, s, _ in chain.atoms)


def link(node: Node, chains: Mapping[str, Chain], values: Mapping[str, Any]) -> Chain | None:
    """The description of a node's value, if it is a link of a chain."""
    if not links(node) or not isinstance(node.args[0], Ref) or not isinstance(values[node.args[0].name], torch.Tensor):
        return None
    source = node.args[0].name
    shape = [expression(s) for s in values[source].shape]
    start = chains.get(source) or Chain(
        source, tuple((i, s, i) for i, s in enumerate(shape)), tuple((i,) if s != 1 else () for i, s in enumerate(shape))
    )
    rank = len(start.groups)
    groups = list(start.groups)
    if node.op in _RESHAPES:
        return _regroup(start, [expression(s) for s in values[node.name].shape])
    if rank == 0 and node.op != "aten.unsqueeze.default":
        return start  # a single number has no dims to change, whatever dims are named
    if node.op == "aten.transpose.int":
        a, b = node.args[1] % rank, node.args[2] % rank
        groups[a], groups[b] = groups[b], groups[a]
    elif node.op == "aten.permute.default":
        groups = [groups[d % rank] for d in node.args[1]]
    elif node.op == "aten.unsqueeze.default":
        groups.insert(node.args[1] % (rank + 1), ())
    else:
        if any(not start.size(i).is_Integer for i in groups[node.args[1] % rank]):
            return None  # a dim that is 1 in some calls is dropped there
        if groups[node.args[1] % rank]:
            return start  # not of size 1: nothing happens
        del groups[node.args[1] % rank]
    return replace(start, groups=tuple(groups))


def _regroup(start: Chain, shape: list[Any]) -> Chain | None:
    """The atoms dealt out to the dims of another shape, parted where a dim ends inside one; None where sizes do not tell."""
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
    """Nodes that make the value from the base by views alone; None where that cannot be."""
    size = {i: s for i, s, _ in chain.atoms}
    home = {i: d for i, _, d in chain.atoms}
    order = [i for i, _, _ in chain.atoms]
    used = [i for g in chain.groups for i in g]
    if sorted(used) != sorted(i for i in order if size[i] != 1):
        return None
    parts: dict[int, list[list[int]]] = {}  # base dim -> its parts, each the atoms of one group
    for group in chain.groups:
        places = [order.index(i) for i in group]
        if places != list(range(places[0], places[0] + len(places))) if places else False:
            return None
        if len({home[i] for i in group}) > 1:
            return None
        if group:
            parts.setdefault(home[group[0]], []).append(list(group))
    nodes: list[Node] = []

    def add(what: str, op: str, *args: Any) -> Ref:
        nodes.append(Node(f"{node.name}_{what}", f"aten.{op}", args, {}, "", node.source))
        return Ref(nodes[-1].name)

    value = Ref(chain.base)
    dims = sorted({d for _, _, d in chain.atoms})
    layout: list[tuple[int, ...]] = []
    for d in dims:
        mine = sorted(parts.get(d, []), key=lambda g: order.index(g[0]))
        if len(mine) > 1:
            known = [sympy.prod([size[i] for i in g]) for g in mine]
            if sum(not k.is_Integer for k in known) > 1:
                return None
            value = add(f"part{d}", "unflatten.int", value, len(layout), [int(k) if k.is_Integer else -1 for k in known])
        layout += [tuple(g) for g in mine] or [()]
    wanted = [tuple(g) for g in chain.groups if g]
    ones = [i for i, g in enumerate(layout) if not g]
    permutation = [layout.index(g) for g in wanted] + ones
    if permutation != list(range(len(layout))):
        value = add("order", "permute.default", value, permutation)
    if ones:
        value = add("drop", "squeeze.dims", value, list(range(len(wanted), len(layout))))
    for at, group in enumerate(chain.groups):
        if not group:
            value = add(f"one{at}", "unsqueeze.default", value, at)
    if nodes:
        nodes[-1] = replace(nodes[-1], name=node.name, out=node.out)
    return nodes
