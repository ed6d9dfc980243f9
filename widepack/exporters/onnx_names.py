"""Names the inputs, outputs and weights of an ONNX model.

Inputs and outputs have the manifest's names. A single output without a name is `output`. An output that has
the name of an input gets the suffix `_new`. A Ragged output is N outputs, `name@0` to `name@N-1`. A Shared
output is expanded to `[N, ...]`. States are inputs and outputs like all others. A weight has its name in the
artifact; a derived weight has the name of the node that computes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..backends.flat import Flat
from ..backends.onnx_model import OnnxModel
from ..errors import LoweringError
from ..ir.tensor_type import TensorType
from .subject import ExportSubject, Written

Named = tuple[Any, str]
"""A value of onnx_ir, and the name that it gets."""


@dataclass(kw_only=True)
class WrittenOnnx(Written):
    """An ONNX model that was written.

    input_numbers: for each input of the model, its number in the program. booleans: which outputs are
    boolean. list_lengths: for each output of the program, how many outputs the model has; 0 for a single
    tensor. states: the output with the new value, by the input's name.
    """

    input_numbers: list[int]
    booleans: list[bool]
    list_lengths: list[int]
    states: dict[str, str]


def name_values(subject: ExportSubject, flat: Flat, translated: OnnxModel) -> WrittenOnnx:
    """Names a model's values. Each output becomes a separate value, and Shared outputs get the member axis.

    Raises: LoweringError for an output that is not a tensor.
    """
    import onnx_ir

    graph = translated.model.graph
    inputs = [(v, subject.entry.inputs[n].name) for v, n in zip(graph.inputs, translated.inputs)]
    outputs, list_lengths = _output_names(subject, flat, translated, {name for _, name in inputs})
    graph.outputs.clear()
    graph.outputs.extend(value for value, _ in outputs)
    slots, sources = flat.program.weights, _weight_sources(subject, flat, translated)
    weights = [(w.value, sources[w.number] or slots[w.number].name) for w in translated.weights]
    _rename(graph, [*inputs, *outputs, *weights])
    values = [value for value, _ in outputs]
    final_inputs = {n: v.name for v, n in zip(graph.inputs, translated.inputs)}
    first = [sum(n or 1 for n in list_lengths[:k]) for k in range(len(list_lengths))]
    return WrittenOnnx(
        opset=translated.model.opset_imports[""],
        inputs=[f"{v.name}={_type(v)}" for v in graph.inputs],
        outputs=[f"{v.name}={_type(v)}" for v in values],
        initializers=len(translated.weights),
        derived=sum(not source for source in sources.values()),
        input_numbers=list(translated.inputs),
        booleans=[v.dtype == onnx_ir.DataType.BOOL for v in values],
        list_lengths=list_lengths,
        states={
            final_inputs[s.input]: str(values[first[s.output]].name)
            for s in subject.entry.state
            if s.input in final_inputs
        },
    )


def _output_names(
    subject: ExportSubject, flat: Flat, translated: OnnxModel, input_names: set[str]
) -> tuple[list[Named], list[int]]:
    """Returns the model's outputs with their names, and how many of them each output of the program has (0: a
    single tensor). Raises: LoweringError for an output that is not a tensor.
    """
    import onnx_ir

    graph = translated.model.graph
    used = {id(v) for v in graph.inputs} | {id(w.value) for w in translated.weights}
    used |= {id(v) for v in graph.initializers.values()}
    state_names = {s.output: subject.entry.inputs[s.input].name for s in subject.entry.state}
    outputs: list[Named] = []
    list_lengths: list[int] = []
    groups = flat.outputs(list(graph.outputs))
    for k, (group, output) in enumerate(zip(groups, subject.program.outputs, strict=True)):
        name = subject.entry.outputs[k].name or state_names.get(k, "output")
        name = f"{name}_new" if name in input_names else name
        is_list = isinstance(group, (list, tuple))
        parts = list(group) if is_list else [group]
        list_lengths.append(len(parts) if is_list else 0)
        for i, value in enumerate(parts):
            if not isinstance(value, onnx_ir.Value):
                raise LoweringError(
                    f"{subject.title}: output {name} is not a tensor, which an ONNX model cannot have"
                )
            if output.kind == "shared" and subject.members:
                value = _expand(graph, value, subject.members)
            elif id(value) in used:
                value = _append_node(graph, value, "Identity", [value], value.shape)
            used.add(id(value))
            outputs.append((value, f"{name}@{i}" if list_lengths[-1] else name))
    return outputs, list_lengths


def _weight_sources(subject: ExportSubject, flat: Flat, translated: OnnxModel) -> dict[int, str]:
    """Returns the artifact's name of each weight by its number: "" for one that the prologue computed.

    Weights are also recognized by their memory, because a view of a weight is still this weight.
    """
    named = [(name, v) for name, v in subject.values.items() if isinstance(v, torch.Tensor)]
    by_memory = {_memory(v): name for name, v in named if v.numel()}
    slots = flat.program.weights
    return {
        w.number: slots[w.number].source or by_memory.get(_memory(flat.weights[w.number]), "")
        for w in translated.weights
    }


def _memory(weight: torch.Tensor) -> tuple[int, int]:
    """Returns the address and the size of a tensor in bytes."""
    return weight.data_ptr(), weight.numel() * weight.element_size()


def _rename(graph: Any, wishes: Sequence[Named]) -> None:
    """Gives values their names. A name that an earlier value has gets `_` behind it, and so do the names of
    all other values of the graph.
    """
    names: set[str] = set()
    final: list[Named] = []
    for value, name in wishes:
        while name in names:
            name += "_"
        names.add(name)
        final.append((value, name))
    renamed = {id(v) for v, _ in final}
    for value in [*graph.initializers.values(), *node_outputs(graph)]:
        if id(value) not in renamed and value.name in names:
            while value.name in names:
                value.name += "_"
            names.add(value.name)
    for i, (value, _) in enumerate(final):
        value.name = f"widepack.{i}"  # two values must not share a name at any time
    for value, name in final:
        value.name = name


def node_outputs(graph: Any) -> Iterator[Any]:
    """Yields the values that nodes compute, in subgraphs too."""
    import onnx_ir

    for node in onnx_ir.traversal.RecursiveGraphIterator(graph):
        yield from node.outputs


def _append_node(graph: Any, value: Any, op: str, inputs: list[Any], shape: Any) -> Any:
    """Appends a node to the graph and returns its output, a new value of `value`'s dtype."""
    import onnx_ir

    node = onnx_ir.node(op, inputs)
    (output,) = node.outputs
    output.name, output.dtype, output.shape = f"{value.name}__{op.lower()}{len(graph)}", value.dtype, shape
    graph.append(node)
    return output


def _expand(graph: Any, value: Any, members: int) -> Any:
    """Expands a Shared value `[...]` to `[N, ...]`."""
    import onnx_ir

    rank = len(value.shape)
    sizes = onnx_ir.Value(
        name=f"{value.name}__members{len(graph)}",
        const_value=onnx_ir.tensor([members, *[1] * rank], dtype=onnx_ir.DataType.INT64),
    )
    sizes.shape, sizes.dtype = onnx_ir.Shape([1 + rank]), onnx_ir.DataType.INT64
    graph.initializers[sizes.name] = sizes
    return _append_node(graph, value, "Expand", [value, sizes], onnx_ir.Shape([members, *value.shape]))


_NAMES = {"FLOAT": "float32", "DOUBLE": "float64"}


def _type(value: Any) -> str:
    """Returns a value's dtype and shape in the form of input specs: `float32[B,3,32]`."""
    name = _NAMES.get(value.dtype.name, value.dtype.name.lower())
    sizes = ("?" if (size := getattr(d, "value", d)) is None else str(size) for d in value.shape or ())
    return str(TensorType(name, tuple(sizes)))
