"""Simplification of the member program, after kinds: the program stays a member program, and no node's kind rises.

requires: a functional member program and the kinds of its slots. ensures: equal answers but for rounding; no value has a higher kind than the one it replaces.

1. Copies and casts that change nothing go.
2. Linear layers come before transposes of their rows, and chains of reshapes and transposes that come down to views become views (views.py).
3. Norms are folded into the weights next to them where no kind rises (folding.py).
4. What nothing reads goes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from widepack_artifacts.program import Kind, Node, Program, Ref

from .folding import fold_batch_norms, fold_layer_norms
from .graph import renamed, sweep, with_nodes
from .views import merge_views, sink_transposes

_COPIES = {
    "aten.clone.default",
    "aten.contiguous.default",
    "aten.alias.default",
    "aten.detach.default",
    "aten.lift_fresh_copy.default",
    "aten.dropout.default",
}
_VIEWS = {"aten.view.default", "aten._unsafe_view.default"}


def simplify(program: Program, slots: Mapping[str, Kind], sizes: Mapping[str, int]) -> Program:
    """The simplified program. slots: kinds of weights and inputs by value name. sizes: an example size of each dim."""
    plain = merge_views(sink_transposes(drop_copies(program)), sizes)
    return sweep(fold_layer_norms(fold_batch_norms(plain, slots), slots))


def simplify_all(programs: Sequence[Program], slots: Mapping[str, Kind], sizes: Mapping[str, int]) -> list[Program]:
    """Each shape signature's program simplified alike."""
    return [simplify(p, slots, sizes) for p in programs]


def drop_copies(program: Program) -> Program:
    """In a functional program a copy means nothing; neither does a cast to the dtype that a value has."""
    to: dict[str, Any] = {}
    types = {s.name: s.type for s in (*program.weights, *program.inputs)} | {n.name: n.out for n in program.nodes}
    kept: list[Node] = []
    for node in program.nodes:
        node = renamed(node, to)
        source = node.args[0] if node.args else None
        if node.op in _VIEWS:  # without the copy before it, memory may need one here
            node = replace(node, op="aten.reshape.default")
        same = isinstance(source, Ref) and types[node.name] != "" and types[source.name] == types[node.name]
        if (node.op in _COPIES and isinstance(source, Ref)) or (node.op == "aten._to_copy.default" and same):
            to[node.name] = source
        else:
            kept.append(node)
    return with_nodes(program, kept, to)
