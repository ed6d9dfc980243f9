"""Small moves on programs that several passes need: reading other values, dropping what nothing reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from widepack_artifacts.program import Node, Program, Ref, refs, substitute

from . import ops


def renamed(node: Node, to: Mapping[str, Any]) -> Node:
    """The node reading other values. to: name -> what stands in its place."""
    if not any(r in to for r in refs((node.args, node.kwargs))):
        return node
    return replace(node, args=substitute(node.args, lambda n: to.get(n, Ref(n))), kwargs=substitute(node.kwargs, lambda n: to.get(n, Ref(n))))


def with_nodes(program: Program, nodes: list[Node], to: Mapping[str, Any]) -> Program:
    """The program with other nodes, its outputs reading what stands in the place of old values."""
    return replace(
        program, nodes=tuple(nodes), outputs=tuple(replace(o, value=substitute(o.value, lambda n: to.get(n, Ref(n)))) for o in program.outputs)
    )


def readers(program: Program) -> dict[str, list[Node]]:
    """The nodes that read each value, in order."""
    found: dict[str, list[Node]] = {}
    for node in program.nodes:
        for r in dict.fromkeys(refs((node.args, node.kwargs))):
            found.setdefault(r, []).append(node)
    return found


def uses(program: Program) -> Counter[str]:
    """How often each value is read, outputs included."""
    return Counter(r for n in program.nodes for r in refs((n.args, n.kwargs))) + Counter(r for o in program.outputs for r in refs(o.value))


def sweep(program: Program) -> Program:
    """The program without nodes and weights that nothing reads."""
    live = {r for o in program.outputs for r in refs(o.value)}
    kept: list[Node] = []
    for node in reversed(program.nodes):
        if node.name in live or not (node.body or ops.pure(node.op, node.args, node.kwargs)):
            kept.append(node)
            live.update(refs((node.args, node.kwargs)))
    return replace(program, nodes=tuple(reversed(kept)), weights=tuple(s for s in program.weights if s.name in live))


def rank_of(type_: str) -> int:
    """The rank of a node's type text; a size may hold commas of its own, in parentheses. 0 where the type is not known."""
    inner = type_.partition("[")[2].rpartition("]")[0]
    depth, dims = 0, int(inner != "")
    for c in inner:
        depth += (c == "(") - (c == ")")
        dims += c == "," and depth == 0
    return dims if type_.endswith("]") else 0
