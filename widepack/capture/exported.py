"""Provides small edits of exported graphs, and what they read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind, TensorArgument


def state_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the parameters and buffers of a module under all their names."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def tensor_inputs(exported: torch.export.ExportedProgram) -> list[fx.Node]:
    """Returns the nodes of the tensors of the call, in order."""
    nodes = {n.name: n for n in exported.graph.nodes}
    return [
        nodes[s.arg.name]
        for s in exported.graph_signature.input_specs
        if s.kind is InputKind.USER_INPUT and isinstance(s.arg, TensorArgument)
    ]


def output_of(exported: torch.export.ExportedProgram) -> Any:
    """Returns the node of the graph's outputs."""
    return next(n for n in exported.graph.nodes if n.op == "output")


def graph_modules(exported: torch.export.ExportedProgram) -> Iterator[fx.GraphModule]:
    """Yields the graph of an export and those inside of it, and writes their code again after their edits."""
    for module in exported.graph_module.modules():
        if isinstance(module, fx.GraphModule):
            yield module
            module.recompile()


def put_in_place(exported: torch.export.ExportedProgram, node: fx.Node, value: fx.Node) -> None:
    """Removes a node of a graph of an export. All that read it read another value, also the outputs."""
    node.replace_all_uses_with(value)
    if node.graph is exported.graph:
        exported.graph_signature.replace_all_uses(node.name, value.name)
    node.graph.erase_node(node)


def reached(start: fx.Node, neighbours: Callable[[fx.Node], Iterable[fx.Node]]) -> Iterator[fx.Node]:
    """Yields the nodes that can be reached from a node, nearest first. It begins with the node itself."""
    waiting, visited = [start], {start}
    for node in waiting:
        yield node
        new = [m for m in neighbours(node) if m not in visited]
        visited.update(new)
        waiting += new
