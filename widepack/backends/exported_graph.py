"""Assembles an ExportedProgram of torch from a program's nodes, without an export.

An export would add conditions of its own (a convolution's choice of kernel limits the batch to below 16) and
take seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)

from widepack_artifacts.program import Program

from ..ir import ops
from ..ir.fake_values import Fakes, bind_sizes_of_data
from ..runtime.graph_module import graph_module

_STANDARD = {
    "aten._reshape_alias.default": "aten.reshape.default",
    "aten.empty.memory_format": "aten.zeros.default",
    "aten.empty_like.default": "aten.zeros_like.default",
    "aten.new_empty.default": "aten.new_zeros.default",
}
"""The ops of a file in the place of those that read memory which no node wrote, or outside of a value."""


@dataclass
class ExportedGraph:
    """A program as a graph with a fake value at each node: its weights, its inputs, and its output node."""

    module: fx.GraphModule
    weights: list[fx.Node]
    inputs: list[fx.Node]
    output: fx.Node


def exported_graph(
    program: Program,
    values: Mapping[str, Any],
    fakes: Fakes,
    device: torch.device,
    input_names: Sequence[str],
) -> ExportedGraph:
    """A program as a graph. values: the fake value of each weight, input and node, by name. input_names: what
    its inputs are called, unless a name is one that Python has itself, such as `input`.
    """
    module = graph_module(program, device, checks="none", input_names=input_names)
    nodes = [n for n in module.graph.nodes if n.op != "output"]
    names = [s.name for s in (*program.weights, *program.inputs)] + [n.name for n in program.nodes]
    for node, name in zip(nodes, names, strict=True):
        node.meta["val"] = values[name]
    for node, written in zip(nodes[len(nodes) - len(program.nodes) :], program.nodes):
        if node.op == "call_function":  # a file has the ops themselves, without what replaces them here
            node.target = ops.resolve(_STANDARD.get(written.op, written.op))
            if written.op in _STANDARD:
                node.args = node.args[:2]
                node.kwargs = {k: v for k, v in node.kwargs.items() if k != "memory_format"}
    bind_sizes_of_data(nodes, fakes)
    count = len(program.weights)
    inputs = nodes[count : count + len(program.inputs)]
    (output,) = (n for n in module.graph.nodes if n.op == "output")
    return ExportedGraph(module, nodes[:count], inputs, output)


def assemble(
    graph: ExportedGraph,
    names: Sequence[str],
    state: Mapping[str, torch.Tensor],
    outputs: Sequence[fx.Node],
    arguments: Any,
    result: Any,
    constraints: Mapping[Any, Any],
) -> ExportedProgram:
    """An ExportedProgram.

    names: of the weights. state: the weights by name. arguments, result: pytrees of the input numbers and the
    output numbers. constraints: the bounds of each symbol of a size.
    """
    specs = [
        InputSpec(InputKind.BUFFER, TensorArgument(n.name), name, True)
        for n, name in zip(graph.weights, names, strict=True)
    ]
    specs += [InputSpec(InputKind.USER_INPUT, TensorArgument(n.name), None) for n in graph.inputs]
    results = [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(n.name), None) for n in outputs]
    input_names = [n.name for n in graph.inputs]
    call = ModuleCallSignature(
        [], [], pytree.tree_structure(arguments), pytree.tree_structure(result), input_names
    )
    graph.module.graph.lint()
    graph.module.recompile()
    return ExportedProgram(
        root=graph.module,
        graph=graph.module.graph,
        graph_signature=ExportGraphSignature(specs, results),
        state_dict=dict(state),
        range_constraints=dict(constraints),
        module_call_graph=[ModuleCallEntry("", call)],
        example_inputs=None,
        constants={},
    )


def size_bounds(fakes: Fakes, dims: Mapping[str, tuple[int, int | None]], least: int = 0) -> dict[Any, Any]:
    """The bounds of each dim's symbol. least: a lower bound of every dim's lower bound."""
    from torch.utils._sympy.numbers import int_oo
    from torch.utils._sympy.value_ranges import ValueRanges

    return {
        fakes.dims[d].node.expr: ValueRanges(max(low, least), int_oo if high is None else high)
        for d, (low, high) in dims.items()
    }
