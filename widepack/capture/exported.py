"""Provides edits of exported graphs, and what they read.

Below autograd `linalg.inv`, `solve`, `cholesky` and `lu_factor` are two ops: one that factors, and one that
raises an error for a singular matrix. An export keeps the second as an effect, which no program can have. So
`check_in_factorizations` lets the first op raise the error: it has an option for it, or there is an op that
always does.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument

from ..ir.torch_internals import aten_packet, is_overload, op_base_name, schema_of


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


def check_in_factorizations(exported: torch.export.ExportedProgram) -> None:
    """Removes the ops that only check a factorization from an export. Other effects stay."""
    graph = exported.graph
    effects = getattr(torch.ops.higher_order, "with_effects", None)
    for node in list(graph.nodes):
        if node.target is not effects or op_base_name(node.args[1]) != "_linalg_check_errors":
            continue
        token, _, info = node.args[:3]
        if not _checks(info):
            continue
        for after in list(node.users):
            put_in_place(exported, after, token)
        graph.erase_node(node)
    graph.eliminate_dead_code()
    _drop_unused_tokens(exported)
    exported.graph_module.recompile()


def _checks(info: fx.Node) -> bool:
    """Lets the op behind `info` raise the error. Returns False if it cannot."""
    factored: Any = info.args[0] if info.target is operator.getitem else None
    if not isinstance(factored, fx.Node) or not is_overload(factored.target):
        return False
    if factored.target is aten_packet("linalg_lu_factor_ex").default:
        factored.target = aten_packet("linalg_lu_factor").default
        return True
    if all(a.name != "check_errors" for a in schema_of(factored.target).arguments):
        return False
    factored.kwargs = {**factored.kwargs, "check_errors": True}
    return True


def _drop_unused_tokens(exported: torch.export.ExportedProgram) -> None:
    """Removes inputs that order effects, where they are outputs again and nothing else reads them."""
    graph, signature = exported.graph, exported.graph_signature
    tokens = {s.arg.name for s in signature.input_specs if s.kind is InputKind.TOKEN}
    output = output_of(exported)
    pairs = list(zip(signature.output_specs, output.args[0]))
    kept = [(s, v) for s, v in pairs if s.kind is not OutputKind.TOKEN or s.arg.name not in tokens]
    signature.output_specs[:] = [s for s, _ in kept]
    output.args = (tuple(v for _, v in kept),)
    unused = {n.name: n for n in graph.nodes if n.name in tokens and not n.users}
    signature.input_specs[:] = [s for s in signature.input_specs if s.arg.name not in unused]
    for node in unused.values():
        graph.erase_node(node)
