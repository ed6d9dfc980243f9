"""Replaces equal nodes by the first of them, so that each value is computed once.

Exported code often computes one value several times: a mask for each layer, a positional table for each
encoder, a transposed weight for each head.

1. Two nodes are equal if they call the same op with the same values and literals.
2. The first of equal nodes stays, and all readers read it. So no kind changes.

Requires: a functional member program.

Leaves alone: ops that draw random numbers, ops that write, and ops whose result has a size that depends on
data: two equal calls of them have different symbols for that size.
"""

from __future__ import annotations

from typing import Any

from widepack_artifacts.program import Node, Program, Ref

from ..ir import ops
from ..ir.edit import renamed, with_nodes


def drop_duplicates(program: Program) -> Program:
    """Returns the program with one node in place of equal nodes."""
    first: dict[str, str] = {}
    kept: list[Node] = []
    to: dict[str, Any] = {}
    for node in program.nodes:
        node = renamed(node, to)
        if node.body is None and ops.repeats(node.op, node.args, node.kwargs):
            # The text tells apart what Python holds equal: True, 1 and 1.0, or 0.0 and -0.0.
            key = f"{node.op} {node.args!r} {sorted(node.kwargs.items())!r}"
            if key in first:
                to[node.name] = Ref(first[key])
                continue
            first[key] = node.name
        kept.append(node)
    return with_nodes(program, kept, to)
