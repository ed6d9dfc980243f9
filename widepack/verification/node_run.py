"""Runs a program node by node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from widepack_artifacts.program import Node, Program, substitute

from ..ir import ops
from ..ir.encoding import decode
from ..ir.fake_values import CPU
from ..runtime.graph_module import Loop
from ..runtime.walk import last_uses

Step = Callable[[Node, Callable[..., Any], list[Any]], Any]
"""Gets a node, what computes it (of operands that a function changes, if one is given), and its operands:
positional ones, and a dict of the others. Returns the node's value.
"""


def run_nodes(program: Program, given: Sequence[Any], step: Step) -> list[Any]:
    """Runs a program node by node, and returns its outputs.

    given: the weights, then the inputs. step: returns the value of each node.
    """
    slots = [*program.weights, *program.inputs]
    values: dict[str, Any] = {s.name: v for s, v in zip(slots, given)}
    for node, ended in zip(program.nodes, last_uses(program)):
        operands = list(decode(substitute((node.args, node.kwargs), values.__getitem__), CPU))
        function: Any = ops.function(node.op) if node.body is None else Loop(node.body, program.members, CPU)

        def compute(
            change: Callable[[Any], Any] | None = None, function: Any = function, operands: Any = operands
        ) -> Any:
            args, kwargs = operands if change is None else pytree.tree_map(change, operands)
            return function(*args, **kwargs)

        values[node.name] = step(node, compute, operands)
        for name in ended:
            values.pop(name, None)
    return [decode(substitute(o.value, values.__getitem__), CPU) for o in program.outputs]


def values_of(program: Program, weights: Mapping[str, Any], inputs: Sequence[Any]) -> dict[str, Any]:
    """Returns every value of a program by name. weights: by source name."""
    given = [*(weights[s.source] for s in program.weights), *inputs]
    values = {s.name: v for s, v in zip((*program.weights, *program.inputs), given)}

    def keep(node: Node, compute: Callable[..., Any], operands: list[Any]) -> Any:
        values[node.name] = compute()
        return values[node.name]

    with torch.inference_mode():
        run_nodes(program, given, keep)
    return values
