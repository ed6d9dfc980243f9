"""Equal nodes become one: the same op of the same values and literals, computed once.

Exported code often makes one value twice: a mask a layer, a positional table an encoder, a transposed weight a head. The first of equal nodes stays and all
readers read it, so no kind changes. Left alone is what draws random numbers, what writes, and what has as many places as the data say: of two equal calls
of such an op each has a size of its own.
"""

from __future__ import annotations

from typing import Any

from widepack_artifacts.program import Node, Program, Ref

from ..ir import ops
from ..ir.edit import renamed, with_nodes


def drop_duplicates(program: Program) -> Program:
    """The program with one node in place of equal ones."""
    first: dict[str, str] = {}
    kept: list[Node] = []
    to: dict[str, Any] = {}
    for node in program.nodes:
        node = renamed(node, to)
        if node.body is None and ops.repeats(node.op, node.args, node.kwargs):
            key = f"{node.op} {node.args!r} {sorted(node.kwargs.items())!r}"  # as text: True, 1 and 1.0 are equal in Python, and so are 0.0 and -0.0
            if key in first:
                to[node.name] = Ref(first[key])
                continue
            first[key] = node.name
        kept.append(node)
    return with_nodes(program, kept, to)
