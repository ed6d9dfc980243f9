"""Runs the passes over a member program, in this order. The result is a member program again.

1. Remove copies and casts that have no effect (`drop_copies`), and equal nodes (common_subexpressions.py).
2. Move linear layers before a new order of their rows (linear_rows.py), and write chains of reshapes and
   transposes as views (view_chains.py).
3. Compute one position of a dim where only one is read (select_pushdown.py).
4. Rewrite values at the true positions of Stacked masks (masked_selection.py).
5. Fold norms into the weights next to them (norm_folding.py), and join narrow linear layers over one value
   (horizontal_fusion.py).
6. Remove equal nodes again, and nodes that no other node reads.
7. Rewrite transposed convolutions of stride 1, and of windows that do not overlap, as convolutions
   (transposed_conv.py).

Steps 1 to 3 do not depend on kinds (`straighten`); the others do (`fold_all`).

Requires: a functional member program and the kinds of its slots. Ensures: equal results except for rounding;
no value has a higher kind than the value that it replaces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from widepack_artifacts.program import Kind, Node, Program, Ref, Tag

from ..ir import ops
from ..ir.edit import DENSE, VIEWS, renamed, sweep, types_of, with_nodes
from ..ir.encoding import type_of
from ..ir.fake_values import Shapes
from .common_subexpressions import drop_duplicates
from .horizontal_fusion import join_siblings
from .linear_rows import rows_in_order
from .masked_selection import select_by_masks
from .norm_folding import fold_batch_norms, fold_layer_norms
from .select_pushdown import narrow
from .transposed_conv import convolve_plainly
from .view_chains import merge_views

_COPIES = ops.full_names("clone contiguous alias detach lift_fresh_copy dropout")
END = (1 << 63) - 1  # export writes it for a slice without an end


def straighten(program: Program, shapes: Shapes) -> Program:
    """Runs the passes that do not depend on kinds: copies, row order, views, positions that no node reads."""
    straight = drop_duplicates(drop_copies(program))
    for rewrite in (rows_in_order, merge_views, narrow):
        straight = rewrite(straight, shapes)
    old, values = {n.name for n in program.nodes}, shapes.of(straight)
    typed = (n if n.out or n.name in old else replace(n, out=type_of(values[n.name])) for n in straight.nodes)
    return replace(straight, nodes=tuple(typed))


def straighten_all(programs: Sequence[Program], shapes: Sequence[Shapes]) -> list[Program]:
    """Runs `straighten` on the program of each shape signature.

    All results have the same nodes. If they differ, for example because of a size of 1, only copies are
    removed.
    """
    straight = [straighten(p, s) for p, s in zip(programs, shapes)]
    return straight if _alike(straight) else [drop_copies(p) for p in programs]


def _alike(programs: Sequence[Program]) -> bool:
    """Whether all programs have the same nodes: names and ops."""
    return all(
        [(n.name, n.op) for n in p.nodes] == [(n.name, n.op) for n in programs[0].nodes] for p in programs
    )


def simplify_all(
    programs: Sequence[Program], slots: Mapping[str, Kind], sizes: Mapping[str, int]
) -> list[Program]:
    """Simplifies the program of each shape signature in the same way.

    slots: the kinds of weights and inputs, by value name. sizes: an example size of each dim.
    """
    return fold_all(straighten_all(programs, [Shapes(sizes) for _ in programs]), slots)


def fold_all(programs: Sequence[Program], slots: Mapping[str, Kind]) -> list[Program]:
    """Runs the passes that depend on kinds over straight programs, in the same way for all."""
    folded = [fold(p, slots) for p in programs]
    plainly = [convolve_plainly(p, slots) for p in folded]
    return plainly if _alike(plainly) else folded


def fold(program: Program, slots: Mapping[str, Kind]) -> Program:
    """Runs the passes that depend on kinds: masked selections, norms and joined layers."""
    folded = fold_layer_norms(fold_batch_norms(select_by_masks(program, slots), slots), slots)
    return sweep(drop_duplicates(join_siblings(folded, slots)))


def drop_copies(program: Program) -> Program:
    """Removes copies, which have no effect in a functional program, and casts that change nothing."""
    to: dict[str, Any] = {}
    types = types_of(program)
    kept: list[Node] = []
    for node in program.nodes:
        node = renamed(node, to)
        source = node.args[0] if node.args else None
        if node.op in DENSE and isinstance(source, Ref):  # the copy before it may be removed
            in_order = {"memory_format": Tag("memory_format", "contiguous_format")}
            kept.append(
                Node(f"{node.name}_dense", "aten.clone.default", (source,), in_order, "", node.source)
            )
            node = replace(node, args=(Ref(kept[-1].name), *node.args[1:]))
        if node.op in VIEWS:  # a view may need a copy if the one before it is removed
            node = replace(node, op="aten.reshape.default")
        same = isinstance(source, Ref) and types[node.name] != "" and types[source.name] == types[node.name]
        copies = (node.op in _COPIES and isinstance(source, Ref)) or (
            node.op == "aten._to_copy.default" and same
        )
        if copies or (node.op == "aten.slice.Tensor" and _is_whole(node)):  # `x[:]`
            to[node.name] = source
        elif (written := _written_whole(node)) is not None and types[written.name] == types[node.name] != "":
            to[node.name] = written
        else:
            kept.append(node)
    return with_nodes(program, kept, to)


def _written_whole(node: Node) -> Ref | None:
    """Returns `y` of `x[:] = y` and of `x.copy_(y)`, which write all of x; None for another node."""
    if node.op != "aten.copy.default" and not (node.op == "aten.slice_scatter.default" and _is_whole(node)):
        return None
    source = ops.bind(node.op, node.args, node.kwargs).get("src")
    return source if isinstance(source, Ref) else None


def _is_whole(node: Node) -> bool:
    """Whether a slice, or a write to one, takes all places of its dim."""
    bound = ops.bind(node.op, node.args, node.kwargs)
    return bound.get("start") in (None, 0) and bound.get("end") in (None, END) and bound.get("step", 1) == 1
