"""Simplification of the member program, after kinds: the program stays a member program, and no node's kind rises.

requires: a functional member program and the kinds of its slots. ensures: equal answers but for rounding; no value has a higher kind than the one it replaces.

1. Copies and casts that change nothing go, and equal nodes become one (duplicates.py).
2. Linear layers come before a new order of their rows (rows.py), and chains of reshapes and transposes that come down to views become views (views.py).
3. Where one position of a dim is read, one is computed (narrowing.py).
4. Norms are folded into the weights next to them where no kind rises (folding.py), and narrow linear layers over one value become one (siblings.py).
5. Values whose number is that of a Stacked mask's true places become values at every place (selecting.py).
6. What nothing reads goes.
7. Transposed convolutions of stride 1 become convolutions over flipped weights (transposed.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from widepack_artifacts.program import Kind, Node, Program, Ref, Tag

from ..ir import ops
from ..ir.encoding import type_of
from .common_subexpressions import drop_duplicates
from .norm_folding import fold_batch_norms, fold_layer_norms
from ..ir.edit import renamed, sweep, with_nodes
from .select_pushdown import narrow
from ..ir.fake_values import Shapes
from .linear_rows import rows_in_order
from .masked_selection import select_by_masks
from .horizontal_fusion import join_siblings
from .transposed_conv import convolve_plainly
from .view_chains import merge_views

_COPIES = {
    "aten.clone.default",
    "aten.contiguous.default",
    "aten.alias.default",
    "aten.detach.default",
    "aten.lift_fresh_copy.default",
    "aten.dropout.default",
}
DENSE = {"aten.view_as_complex.default", "aten.view.dtype"}  # read memory, so its order matters
END = (1 << 63) - 1  # what export writes for no end
_VIEWS = {"aten.view.default", "aten._unsafe_view.default"}


def straighten(program: Program, shapes: Shapes) -> Program:
    """What does not hang on kinds: copies, orders of rows, views, positions that nothing reads."""
    made = narrow(merge_views(rows_in_order(drop_duplicates(drop_copies(program)), shapes), shapes), shapes)
    old, values = {n.name for n in program.nodes}, shapes.of(made)
    return replace(made, nodes=tuple(n if n.out or n.name in old else replace(n, out=type_of(values[n.name])) for n in made.nodes))


def straighten_all(programs: Sequence[Program], shapes: Sequence[Shapes]) -> list[Program]:
    """The programs of members of other shapes, alike: where a size of 1 lets one be straightened further than another, none is."""
    made = [straighten(p, s) for p, s in zip(programs, shapes)]
    return made if _alike(made) else [drop_copies(p) for p in programs]


def _alike(programs: Sequence[Program]) -> bool:
    """Whether all have nodes of the same names and ops."""
    return all([(n.name, n.op) for n in p.nodes] == [(n.name, n.op) for n in programs[0].nodes] for p in programs)


def simplify_all(programs: Sequence[Program], slots: Mapping[str, Kind], sizes: Mapping[str, int]) -> list[Program]:
    """Each shape signature's program simplified alike. slots: kinds of weights and inputs by value name. sizes: an example size of each dim."""
    folded = [fold(p, slots) for p in straighten_all(programs, [Shapes(sizes) for _ in programs])]
    plainly = [convolve_plainly(p, slots) for p in folded]
    return plainly if _alike(plainly) else folded


def simplify(program: Program, slots: Mapping[str, Kind], sizes: Mapping[str, int]) -> Program:
    """The same of one program."""
    return simplify_all([program], slots, sizes)[0]


def fold(program: Program, slots: Mapping[str, Kind]) -> Program:
    """What hangs on kinds: values at places of masks, norms folded into the weights next to them, layers joined."""
    folded = fold_layer_norms(fold_batch_norms(select_by_masks(program, slots), slots), slots)
    return sweep(drop_duplicates(join_siblings(folded, slots)))


def drop_copies(program: Program) -> Program:
    """In a functional program a copy means nothing; neither does a cast to the dtype that a value has."""
    to: dict[str, Any] = {}
    types = {s.name: s.type for s in (*program.weights, *program.inputs)} | {n.name: n.out for n in program.nodes}
    kept: list[Node] = []
    for node in program.nodes:
        node = renamed(node, to)
        source = node.args[0] if node.args else None
        if node.op in DENSE and isinstance(source, Ref):  # the copy before it may have gone
            kept.append(
                Node(
                    f"{node.name}_dense",
                    "aten.clone.default",
                    (source,),
                    {"memory_format": Tag("memory_format", "contiguous_format")},
                    "",
                    node.source,
                )
            )
            node = replace(node, args=(Ref(kept[-1].name), *node.args[1:]))
        if node.op in _VIEWS:  # without the copy before it, memory may need one here
            node = replace(node, op="aten.reshape.default")
        same = isinstance(source, Ref) and types[node.name] != "" and types[source.name] == types[node.name]
        if (node.op in _COPIES and isinstance(source, Ref)) or (node.op == "aten._to_copy.default" and same) or _all(node):
            to[node.name] = source
        else:
            kept.append(node)
    return with_nodes(program, kept, to)


def _all(node: Node) -> bool:
    """Whether the node is `x[:]`: a slice that takes everything."""
    if node.op != "aten.slice.Tensor":
        return False
    given = ops.bind(node.op, node.args, node.kwargs)
    return given.get("start") in (None, 0) and given.get("end") in (None, END) and given.get("step", 1) == 1
