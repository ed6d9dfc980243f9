"""A flat program as an ONNX model, and a session of ONNX Runtime for one: what the backend `onnxruntime` runs and `widepack.export` writes.

torch's exporter translates an ExportedProgram that is put together from the nodes that are there (exporting again would add conditions of its own). Sizes are then
computed as far as they can be, with weights as inputs meanwhile, so that no value of a weight gets into the graph: whoever asked says where weights are.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec, OutputKind, OutputSpec, TensorArgument
from torch.utils.dlpack import from_dlpack

from widepack_artifacts.program import Node, Ref, Slot

from ..errors import LoweringError
from .flat import Flat
from .onnx_split_join import join_members
from .onnx_reshapes import simplify_reshapes
from .task import Mapped, Sizes, quiet

_WEIGHT = re.compile(r"w([0-9]+)\Z")
_SYMBOL = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass
class Initializer:
    """A weight of an ONNX model. number: of the flat program's weight. value: of the graph; it has no tensor yet. dtype, shape: of that, as onnx_ir has them."""

    number: int
    value: Any
    dtype: Any
    shape: Any


@dataclass
class OnnxModel:
    """model: an onnx_ir model. weights: those that something reads; `give` puts one into the graph. inputs: the numbers of the flat program's inputs, in the
    model's order. booleans: which outputs are."""

    model: Any
    weights: list[Initializer]
    inputs: list[int]
    booleans: list[bool]

    def give(self, weight: Initializer, tensor: Any) -> None:
        """Make a weight an initialiser. tensor: an onnx_ir tensor, inside the model or outside."""
        weight.value.const_value = tensor
        assert weight.value.name is not None  # another one than before where the program gives the weight back as it is
        self.model.graph.initializers[weight.value.name] = weight.value


def onnx_model(
    flat: Flat, device: torch.device, dims: Mapping[str, tuple[int, int | None]], example: Sizes, said: str, opset: int | None = None
) -> OnnxModel:
    """A flat program as a model. dims: least and most of each. example: sizes at which its guards hold. opset: None for torch's own choice.

    Dims of the model's values have the names that they have in `dims`. Raises: LoweringError, ImportError, and whatever torch's exporter raises.
    """
    import onnxscript.optimizer

    exported, booleans, symbols = _exported(flat, device, dims, example, said)
    with warnings.catch_warnings(), quiet(), torch.no_grad():
        warnings.simplefilter("ignore")
        made: Any = torch.onnx.export(exported, dynamo=True, optimize=False, verbose=False, external_data=False, opset_version=opset)
    model = made.model
    takes = [int(str(v.name)[1:]) for v in model.graph.inputs]
    held = {name: v for name, v in model.graph.initializers.items() if _WEIGHT.match(name)}
    kinds = {name: (v.const_value.dtype, v.const_value.shape) for name, v in held.items()}
    for name, value in held.items():
        del model.graph.initializers[name]
        value.const_value = None
        model.graph.inputs.append(value)
    with warnings.catch_warnings(), quiet():
        warnings.simplefilter("ignore")
        onnxscript.optimizer.optimize(model)
        if simplify_reshapes(model) + join_members(model, held.values()):
            onnxscript.optimizer.remove_unused_nodes(model)  # a session runs what nothing reads
    for value in held.values():
        model.graph.inputs.remove(value)
    _name_dims(model, symbols)
    read = [(name, v) for name, v in held.items() if v.uses() or v in model.graph.outputs]
    return OnnxModel(model, [Initializer(int(name[1:]), v, *kinds[name]) for name, v in read], takes, booleans)


def session(
    path: Path, inputs: Sequence[int], booleans: Sequence[bool], weights: Mapping[str, torch.Tensor], onnxruntime: Any, workers: int = 0
) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]:
    """A session of ONNX Runtime: a flat program's inputs -> its outputs.

    inputs, booleans: as `OnnxModel` has them. weights: initialisers that are given from memory, by name. workers: how many ops at once, each on a thread of its own;
    0 for one, on all threads. Raises: ValueError for a file of other inputs or outputs, and whatever ONNX Runtime raises.
    """
    options = onnxruntime.SessionOptions()
    if workers > 1:
        options.execution_mode = onnxruntime.ExecutionMode.ORT_PARALLEL
    options.intra_op_num_threads = 1 if workers > 1 else torch.get_num_threads()
    options.inter_op_num_threads = max(1, workers)
    # its threads wait for the next call asleep: in a loop they take the processors from torch's, and from other sessions'
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.log_severity_level = 3
    value = onnxruntime.OrtValue.from_dlpack
    held = [value(w.detach()) for w in weights.values()]
    if held:
        options.add_external_initializers(list(weights), held)
    made = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names, takes = [o.name for o in made.get_outputs()], [i.name for i in made.get_inputs()]
    if len(names) != len(booleans) or len(takes) != len(inputs):
        raise ValueError("inputs and outputs are not those of the record")

    def run(given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        found = made.run_with_ort_values(names, {name: value(given[i].detach()) for name, i in zip(takes, inputs)})
        answers = [from_dlpack(v) for v in found]
        return [a.view(torch.bool) if b and a.dtype != torch.bool else a for a, b in zip(answers, booleans)]

    run.keeps = held  # type: ignore[attr-defined]  # the session looks into their memory
    return run


def _name_dims(model: Any, symbols: Mapping[str, str]) -> None:
    """Torch's symbols in the shapes of values -> the names of dims: `2*s17` -> `2*T`."""
    import onnx_ir

    for value in [*model.graph.inputs, *(v for n in onnx_ir.traversal.RecursiveGraphIterator(model.graph) for v in n.outputs)]:
        if value.shape is None or all(isinstance(d, int) for d in value.shape):
            continue
        sizes = [d if isinstance(d, int) else d.value and _SYMBOL.sub(lambda m: symbols.get(m[0], m[0]), d.value) for d in value.shape]
        value.shape = onnx_ir.Shape(sizes)


def _exported(
    flat: Flat, device: torch.device, dims: Mapping[str, tuple[int, int | None]], example: Sizes, said: str
) -> tuple[ExportedProgram, list[bool], dict[str, str]]:
    """The program as torch's exporters take it, which outputs are booleans, and the dims by torch's symbols."""
    from torch.utils._sympy.numbers import int_oo
    from torch.utils._sympy.value_ranges import ValueRanges

    from ..ir.fake_values import Fakes, bind_sizes_of_data, replay
    from ..runtime.graph_module import graph_module

    program = flat.program
    fakes = Fakes({d: max(2, s) for d, s in example.items()})
    values = replay(program, fakes, {s.name: fakes.mode.from_tensor(w, static_shapes=True) for s, w in zip(program.weights, flat.weights)})
    module = graph_module(program, device)
    nodes = [n for n in module.graph.nodes if n.op != "output"]
    names = [s.name for s in (*program.weights, *program.inputs)] + [n.name for n in program.nodes]
    for node, name in zip(nodes, names, strict=True):
        node.meta["val"] = values[name]
    bind_sizes_of_data(nodes, fakes)
    count = len(program.weights)
    inputs = nodes[count : count + len(program.inputs)]
    for i, node in enumerate(inputs):
        node._rename(f"x{i}")
        node.target = node.name
    (output,) = (n for n in module.graph.nodes if n.op == "output")
    outs: Sequence[Any] = output.args[0]
    found = [values[o.value.name] for o in program.outputs]
    if not all(isinstance(v, torch.Tensor) for v in found):
        raise LoweringError(f"{said} has an output that is no tensor, which ONNX cannot say")
    specs = [InputSpec(InputKind.BUFFER, TensorArgument(n.name), f"w{i}", True) for i, n in enumerate(nodes[:count])]
    specs += [InputSpec(InputKind.USER_INPUT, TensorArgument(n.name), None) for n in inputs]
    call = ModuleCallSignature(
        [], [], pytree.tree_structure((tuple(range(len(inputs))), {})), pytree.tree_structure(tuple(range(len(outs)))), [n.name for n in inputs]
    )
    module.graph.lint()
    module.recompile()
    exported = ExportedProgram(
        root=module,
        graph=module.graph,
        graph_signature=ExportGraphSignature(specs, [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(n.name), None) for n in outs]),
        state_dict={f"w{i}": w for i, w in enumerate(flat.weights)},
        range_constraints={
            fakes.dims[d].node.expr: ValueRanges(max(least, 1), int_oo if most is None else most) for d, (least, most) in dims.items()
        },
        module_call_graph=[ModuleCallEntry("", call)],
        example_inputs=None,
        constants={},
    )
    return exported, [v.dtype == torch.bool for v in found], {str(fakes.dims[d].node.expr): d for d in dims}


def in_order(flat: Flat) -> Flat:
    """Weights in the order of their memory, as DLPack hands them over, and permuted by the program: a transposed view of a mapped weight stays that weight."""
    slots: list[Slot] = []
    nodes: list[Node] = []
    weights: list[torch.Tensor] = []
    for slot, weight in zip(flat.program.weights, flat.weights):
        if weight.is_contiguous():
            slots.append(slot)
            weights.append(weight)
            continue
        strides = list(weight.stride())
        order = sorted(range(weight.dim()), key=lambda d: (-strides[d], -weight.shape[d], d))
        slots.append(replace(slot, name=f"{slot.name}__in_order", source="", type=""))
        weights.append(weight.permute(order).contiguous())
        nodes.append(Node(slot.name, "aten.permute.default", (Ref(slots[-1].name), [order.index(d) for d in range(len(order))])))
    return Flat(replace(flat.program, weights=tuple(slots), nodes=(*nodes, *flat.program.nodes)), weights, flat.shape, flat.parts)


def where_mapped(weight: torch.Tensor, located: Sequence[Mapped]) -> tuple[str, int] | None:
    """The file and the offset of a weight that is part of a mapped tensor; None for one that is in no file."""
    at, size = weight.data_ptr(), weight.numel() * weight.element_size()
    return next(((m.file, m.offset + at - m.at) for m in located if size and m.at <= at and at + size <= m.at + m.bytes), None)
