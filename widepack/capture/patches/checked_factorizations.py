"""Lets factorizations of matrices check their results themselves.

Below autograd `linalg.inv`, `solve`, `cholesky` and `lu_factor` are two ops: one that factors, and one that
raises an error for a singular matrix. An export keeps the second as an effect, which no program can have.
Here the first op raises the error: it has an option for it, or there is an op that always does.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind, OutputKind

from ...ir.torch_internals import aten_packet, is_overload, op_base_name, schema_of
from ..exported import output_of, put_in_place


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
