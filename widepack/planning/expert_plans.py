"""Plans for networks that select a matrix for each row: the strategy `experts`, at every batch of a CPU.

A product over matrices that an index selects (primitives/experts.py) runs by expert in a wide region. In a
loop it copies a matrix for each row. So a network with such products runs wide at every batch. The other ops
of the network would gain less from a loop than the products would lose.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from widepack_artifacts.program import Kind, Node, Program, Ref, refs

from ..ir import ops
from ..ir.encoding import map_arguments
from ..ir.fake_values import Fakes, replay
from ..ir.values import GatheredMatrices, Shared, Stacked, Value
from ..kernels.experts import OF_ONE_MEMBER
from ..primitives.index_values import gathered
from ..registry.registry import strategies_of
from ..registry.writer import Writer
from .plan import NodeChoice

EXPERTS = "experts"
BECAUSE = "each expert that has rows is one product; a loop would copy the matrix of each row"
_READS = {"aten.index.Tensor": 0, "aten.index_select.default": 0}


def expert_layers(
    program: Program, found: Mapping[str, Kind], sizes: Mapping[str, int]
) -> dict[str, NodeChoice]:
    """Returns the products over selected matrices that can run by expert, each with the strategy `experts`.

    Args:
        program: The member program.
        found: The kinds of its values.
        sizes: An example size of each dim.
    """
    reads = {n.name: n for n in program.nodes if n.op in _READS and found[n.name] == "stacked"}
    products = [
        n
        for n in program.nodes
        if EXPERTS in strategies_of(n.op)
        and found[n.name] == "stacked"
        and (n.op == OF_ONE_MEMBER or any(r in reads for r in refs((n.args, n.kwargs))))
    ]
    if not products:
        return {}
    fakes = Fakes(sizes, static=True)
    try:
        values = replay(program, fakes)
    except (DataDependentOutputException, DynamicOutputShapeException):
        return {}
    with fakes.on():
        return {n.name: NodeChoice(EXPERTS, BECAUSE) for n in products if _fits(n, reads, found, values)}


def _fits(
    node: Node, reads: Mapping[str, Node], found: Mapping[str, Kind], values: Mapping[str, Any]
) -> bool:
    """Returns whether the strategy applies to a product."""

    def wide(x: Any) -> Any:
        if not isinstance(x, Ref):
            return x
        if found[x.name] != "stacked" or not isinstance(values[x.name], torch.Tensor):
            return Shared(Value(x, values[x.name])) if found[x.name] == "shared" else None
        parts = _parts(map_arguments(_operands(reads[x.name]), wide)) if x.name in reads else None
        return Stacked(Value(x, values[x.name].unsqueeze(0)), gathered=parts)

    args, kwargs = map_arguments((node.args, node.kwargs), wide)
    return bool(strategies_of(node.op)[EXPERTS].when(Writer(1), *args, **kwargs))


def _operands(read: Node) -> tuple[Any, Any, Any]:
    """Returns the table, the dim and the indices of a node that reads at indices."""
    bound = ops.bind(read.op, read.args, read.kwargs)
    return bound["self"], bound.get("dim", 0), bound["indices"] if "indices" in bound else [bound["index"]]


def _parts(operands: tuple[Any, Any, Any]) -> GatheredMatrices | None:
    table, dim, indices = operands
    known = isinstance(table, (Shared, Stacked)) and isinstance(indices[0], (Shared, Stacked))
    return gathered(table, dim, indices[0]) if known and len(indices) == 1 else None
