"""Translates a flat program into an ONNX model.

The backend `onnxruntime` runs the model, and `widepack.export` writes it. torch's exporter translates an
ExportedProgram that `exported_graph.py` assembles. Then sizes are computed as far as possible. Weights are
inputs of the model at that time, so that no value of a weight becomes a constant; the caller decides where
weights are stored.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram

from widepack_artifacts.program import Program

from ..errors import LoweringError
from .flat import Flat
from .member_loops import border_source, cut, of_members
from .onnx_members import Borders, divide
from .onnx_recurrent import recurrent_layers
from .onnx_repeat import ANY, GraphInput, MemberGraph
from .onnx_rewrites import join_members, simplify_reshapes
from .task import Mapped, Sizes, quiet

_WEIGHT = re.compile(r"w([0-9]+)\Z")
_SYMBOL = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass
class Initializer:
    """A weight of an ONNX model.

    number: of the flat program's weight. value: its value in the graph, without a tensor yet.

    dtype, shape: of that tensor, in onnx_ir's classes.
    """

    number: int
    value: Any
    dtype: Any
    shape: Any


@dataclass
class OnnxModel:
    """An ONNX model whose weights have no tensors yet.

    model: of onnx_ir. weights: those that a node reads; `give` adds one to the graph. inputs: the numbers of
    the flat program's inputs, in the order of the model. booleans: which outputs are boolean. outputs: the
    values that the program's outputs are, each with its member, as in `onnx_members.py`.
    """

    model: Any
    weights: list[Initializer]
    inputs: list[int]
    booleans: list[bool]
    outputs: list[tuple[Any, int]]

    def give(self, weight: Initializer, tensor: Any) -> None:
        """Makes a weight an initialiser. tensor: of onnx_ir, in the model or in another file."""
        weight.value.const_value = tensor
        assert weight.value.name is not None  # the name changes if the program returns the weight itself
        self.model.graph.initializers[weight.value.name] = weight.value


def onnx_model(
    flat: Flat,
    device: torch.device,
    dims: Mapping[str, tuple[int, int | None]],
    example: Sizes,
    title: str,
    opset: int | None = None,
    *,
    flags: bool = False,
) -> OnnxModel:
    """Translates a flat program.

    The dims of the model's values have the names of `dims`.

    dims: the least and the largest size of each. example: sizes at which the guards hold. opset: None for
    torch's default. flags: whether the last output of a program with indices says that one was out of range
    (`index_flags.py`). Raises: LoweringError, ImportError, and whatever torch's exporter raises.
    """
    import onnxscript.optimizer

    one = _exported(flat, device, dims, example, title, flags)
    with warnings.catch_warnings(), quiet(), torch.no_grad():
        warnings.simplefilter("ignore")
        translated: Any = torch.onnx.export(
            one.exported,
            dynamo=True,
            optimize=False,
            verbose=False,
            external_data=False,
            opset_version=opset,
            custom_translation_table=recurrent_layers(one.exported.graph),
        )
    model = translated.model
    numbers = {name: i for i, name in enumerate(one.exported.graph_signature.user_inputs)}
    takes = {numbers[str(v.name)]: v for v in model.graph.inputs}
    weights = {name: v for name, v in model.graph.initializers.items() if _WEIGHT.match(name)}
    kinds = {name: (v.const_value.dtype, v.const_value.shape) for name, v in weights.items()}
    for name, value in weights.items():
        del model.graph.initializers[name]
        value.const_value = None
        model.graph.inputs.append(value)
    with warnings.catch_warnings(), quiet():
        warnings.simplefilter("ignore")
        onnxscript.optimizer.optimize(model)
        simplify_reshapes(model)
        onnxscript.optimizer.remove_unused_nodes(model)
        inputs = {s.name: takes[i] for i, s in enumerate(one.program.inputs) if i in takes}
        outputs = [(v, -1) for v in model.graph.outputs]
        if flat.loops:
            outputs = _divided(model, flat, one, inputs, weights)
        else:
            join_members(model, weights.values())
        onnxscript.optimizer.remove_unused_nodes(model)  # a session also runs nodes that nothing reads
    made: list[Initializer] = []
    for name, value in weights.items():
        if value.uses() or value.is_graph_output():
            made.append(Initializer(int(name[1:]), value, *kinds[name]))
        if value.is_graph_input():
            model.graph.inputs.remove(value)
    _name_dims(model, one.symbols)
    given = {id(v): i for i, v in takes.items()}  # an optimizer may have changed names
    return OnnxModel(model, made, [given[id(v)] for v in model.graph.inputs], one.booleans, outputs)


def member_graph(flat: Flat, made: OnnxModel) -> MemberGraph:
    """The ONNX graph of a flat program, without its weights."""
    import onnx_ir

    loops = flat.loops
    each = {*loops.inputs, *loops.weights} if loops else set()
    inputs = [
        GraphInput(str(v.name), number, flat.program.inputs[number].name in each)
        for number, v in zip(made.inputs, made.model.graph.inputs, strict=True)
    ]
    weights = []
    for w in made.weights:
        tensor = flat.weights[w.number]
        dims = tuple(int(d) for d in w.shape)
        name = flat.program.weights[w.number].name
        weights.append(
            GraphInput(str(w.value.name), w.number, name in each, int(w.dtype), dims, tensor.nbytes)
        )
    outputs = tuple((str(v.name), member) for v, member in made.outputs)
    made.model.graph.inputs.extend(w.value for w in made.weights)
    for node in made.model.graph.all_nodes():
        node.metadata_props.clear()  # of torch's exporter: where each node is from
    data = onnx_ir.to_proto(made.model).SerializeToString()
    return MemberGraph(data, tuple(inputs), tuple(weights), outputs, tuple(made.booleans))


def _name_dims(model: Any, symbols: Mapping[str, str]) -> None:
    """Replaces torch's symbols in the shapes of values by the names of dims: `2*s17` becomes `2*T`."""
    import onnx_ir

    for value in [
        *model.graph.inputs,
        *(v for n in onnx_ir.traversal.RecursiveGraphIterator(model.graph) for v in n.outputs),
    ]:
        if value.shape is None or all(isinstance(d, int) for d in value.shape):
            continue
        sizes = [
            d if isinstance(d, int) else d.value and _SYMBOL.sub(lambda m: symbols.get(m[0], m[0]), d.value)
            for d in value.shape
        ]
        value.shape = onnx_ir.Shape(sizes)


@dataclass
class _OnnxSource:
    """exported: a program of torch. program: the flat program, with flags, cut at its loops. outputs: of the
    flat program, with the member of each. booleans: which of these are boolean. symbols: the dim of each of
    torch's symbols.
    """

    exported: ExportedProgram
    program: Program
    outputs: list[tuple[str, int]]
    booleans: list[bool]
    symbols: dict[str, str]


def _exported(
    flat: Flat,
    device: torch.device,
    dims: Mapping[str, tuple[int, int | None]],
    example: Sizes,
    name: str,
    flags: bool,
) -> _OnnxSource:
    """The program in the form of torch's exporters."""
    from ..ir.fake_values import replay
    from .exported_graph import assemble, exported_graph, size_bounds
    from .index_flags import add_flags, is_flagged
    from .tracing import fake_values

    program, loops = flat.program, flat.loops
    fakes, values = fake_values(flat, example)
    if flags and is_flagged(program):
        program = add_flags(program, values)
        values = replay(program, fakes, {s.name: values[s.name] for s in (*program.weights, *program.inputs)})
    results = [values[o.value.name] for o in program.outputs]
    if not all(isinstance(v, torch.Tensor) for v in results):
        raise LoweringError(f"{name}: an output is not a tensor, which an ONNX model cannot have")
    members = list(loops.outputs if loops else [-1] * len(flat.program.outputs))
    if len(results) > len(members):
        any_member = loops and program.outputs[-1].value.name in of_members(program, loops)
        members.append(ANY if any_member else -1)
    names = [o.value.name for o in program.outputs]
    if loops:
        program = cut(program, loops)
    graph = exported_graph(program, values, fakes, device, [f"x{i}" for i in range(len(program.inputs))])
    _answer_zero_without_keys(graph.module.graph)
    outputs: Any = graph.output.args[0]
    state = {f"w{i}": w for i, w in enumerate(flat.weights)}
    arguments: Any = (tuple(range(len(graph.inputs))), {})
    bounds = size_bounds(fakes, dims, 1)
    exported = assemble(graph, list(state), state, outputs, arguments, tuple(range(len(outputs))), bounds)
    symbols = {str(fakes.dims[d].node.expr): d for d in dims}
    booleans = [v.dtype == torch.bool for v in results]
    return _OnnxSource(exported, program, list(zip(names, members)), booleans, symbols)


def _divided(
    model: Any, flat: Flat, one: _OnnxSource, inputs: Mapping[str, Any], weights: Mapping[str, Any]
) -> list[tuple[Any, int]]:
    """Divides a model into the nodes of one member and the others. inputs: of the model, by the flat
    program's names. Returns: the outputs, each with its member.
    """
    assert flat.loops is not None
    loops = flat.loops
    outputs = zip(one.program.outputs, model.graph.outputs, strict=True)
    made = {**{o.value.name: v for o, v in outputs}, **inputs}
    borders = {n.name: border_source(n) for n in flat.program.nodes if n.name in loops.selects | loops.joins}
    pairs = {name: (made[name], made[source]) for name, source in borders.items()}
    slots = enumerate(flat.program.weights)
    of_member = [weights[f"w{i}"] for i, s in slots if s.name in loops.weights and f"w{i}" in weights]
    of_member += [made[name] for name in loops.inputs if name in made]
    given = Borders(
        [pairs[name] for name in borders if name in loops.selects],
        [pairs[name] for name in borders if name in loops.joins],
        of_member,
        [(made[name], member) for name, member in one.outputs],
    )
    return divide(model, given)


def _answer_zero_without_keys(graph: Any) -> None:
    """Makes attention answer 0 for a query that may see no key, as torch does.

    torch's exporter forbids keys by the lowest number, not by -inf, and the answer is the mean of all values.
    """
    aten = torch.ops.aten
    for node in graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default):
        mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
        if mask is None or mask.meta["val"].dtype != torch.bool:
            continue
        users = list(node.users)
        with graph.inserting_after(node):
            sees = graph.call_function(aten.any.dim, (mask, -1, True))
        with graph.inserting_after(sees):
            answer = graph.call_function(aten.where.ScalarOther, (sees, node, 0.0))
        sees.meta["val"], answer.meta["val"] = mask.meta["val"].any(-1, keepdim=True), node.meta["val"]
        for user in users:
            user.replace_input_with(node, answer)


def external_tensor(weight: Initializer, file: str, offset: int, size: int) -> Any:
    """Returns a tensor of onnx_ir whose bytes are in another file. file: relative to the model's folder."""
    import onnx_ir

    shape, name = weight.shape, weight.value.name
    return onnx_ir.ExternalTensor(file, offset, size, weight.dtype, shape=shape, name=name, base_dir="")


def where_mapped(weight: torch.Tensor, located: Sequence[Mapped]) -> tuple[str, int] | None:
    """The file and the offset of a weight that is part of a mapped tensor; None for a weight in no file."""
    at, size = weight.data_ptr(), weight.numel() * weight.element_size()
    return next(
        (
            (m.file, m.offset + at - m.at)
            for m in located
            if size and m.at <= at and at + size <= m.at + m.bytes
        ),
        None,
    )
