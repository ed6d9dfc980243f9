"""Finds results whose size random numbers determine: no walk can bound the memory of these."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from widepack_artifacts.program import Node, Program, refs

from ..ir import ops

_UNWRITTEN = ("empty", "empty_like", "new_empty")
_SIZING = {"aten.index.Tensor": 1, "aten.masked_select.default": 1, "aten.repeat_interleave.self_Tensor": 1}
"""The argument whose values determine the size of the result. Other ops: all arguments."""


def random_size(program: Program, drawn: Collection[str] = ()) -> tuple[Node | None, bool]:
    """Finds the first node whose result's size depends on random numbers, or on memory that nothing has
    written.

    drawn: the inputs that contain random numbers. Returns: that node or None, and whether the program draws
    any.
    """
    random, any_drawn = set(drawn), False
    for node in program.nodes:
        reads = any(r in random for r in refs((node.args, node.kwargs)))
        if node.body is not None:
            inside = [
                s.name for s, a in zip(node.body.inputs, node.args) if any(r in random for r in refs(a))
            ]
            found, draws = random_size(node.body, inside)
            if found is not None:
                return found, True
        else:
            if reads and ops.of_values(node.op) and any(r in random for r in refs(_sizing(node))):
                return node, True
            draws = not ops.pure(node.op, node.args, node.kwargs) or node.op.split(".")[1] in _UNWRITTEN
        any_drawn |= draws
        if reads or draws:
            random.add(node.name)
    return None, any_drawn


def _sizing(node: Node) -> Any:
    """Returns the arguments whose values determine the size of a node's result."""
    place = _SIZING.get(node.op)
    if place is None or len(node.args) <= place:
        return node.args, node.kwargs
    return node.args[place]
