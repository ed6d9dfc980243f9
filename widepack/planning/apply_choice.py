"""Runs a node of the member program for all members, by the strategy that a plan chooses.

The first of these that is possible runs a node:

1. the op itself, once, if all arguments are Shared and the op is pure
2. the strategy that the plan names
3. the first strategy of the op that applies
4. `sequential`
"""

from __future__ import annotations

from typing import Any

from widepack_artifacts.program import Node

from ..errors import LoweringError
from ..ir import ops
from ..ir.values import Ragged, Shared
from ..registry.registry import strategies_of
from ..registry.sequential import sequential
from ..registry.writer import Writer, put_shared, wide_items


def apply_choice(w: Writer, node: Node, args: Any, kwargs: Any, strategy: str | None) -> tuple[Any, str]:
    """Runs a node with the first possible strategy.

    Args:
        w: The writer, which knows the node's op.
        node: The node of the member program.
        args: Its wide values and literals.
        kwargs: The same, by name.
        strategy: The strategy that the plan names, or None.

    Returns:
        The wide value, and the name of the strategy that computes it.

    Raises:
        LoweringError: An argument is Ragged.
    """
    wides = wide_items([args, kwargs])
    if any(isinstance(x, Ragged) for x in wides):
        raise LoweringError(f"node {node.name} reads a Ragged value outside a loop region")
    if runs_once(node, args, kwargs):
        return w.shared(w.call(node.op, *put_shared(args), **put_shared(kwargs))), "once"
    strategies = strategies_of(node.op)
    named = strategies.get(strategy or "")
    if named is not None and named.when(w, *args, **kwargs):
        return named.rule(w, *args, **kwargs), named.name
    if strategy != "sequential":
        for s in strategies.values():
            if s.when(w, *args, **kwargs):
                return s.rule(w, *args, **kwargs), s.name
    return sequential(w, node.op, args, kwargs), "sequential"


def runs_once(node: Node, args: Any, kwargs: Any) -> bool:
    """Returns whether a node runs once for all members: all arguments are Shared, and the op is pure."""
    wides = wide_items([args, kwargs])
    return all(isinstance(x, Shared) for x in wides) and ops.pure(node.op, node.args, node.kwargs)
