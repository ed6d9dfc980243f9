"""Writes a member's export by torch.export as a member program: weights, inputs, nodes and outputs.

Weights are named as in the state dict. The result of the member becomes a tree over the outputs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument

from widepack_artifacts.errors import some
from widepack_artifacts.opset import allowed
from widepack_artifacts.program import Node, Output, Program, Ref, Slot
from widepack_artifacts.tree import Tree, paths

from ..errors import CaptureError
from ..ir import ops
from ..ir.edit import with_reshapes
from ..ir.encoding import encode, type_of
from ..ir.guards import factor_of
from ..ir.torch_tuples import TORCH_TUPLE, torch_fields
from ..ir.values import known
from ..spec.entries import FORWARD
from ..spec.input_spec import DimExpr
from .effects import drop_asserts
from .explain import is_of_value, no_form, source_of
from .exported import output_of, state_tensors, tensor_inputs
from .named_fields import Fields
from .reachable import same_memory, tensors_of
from .state import ExportedMember, ExportedStates, NewValue

_FUNCTIONAL = {  # writes and Python operators -> the functional ATen op
    "aten.zero.default": "aten.zeros_like.default",
    "aten.item.default": "aten._local_scalar_dense.default",
    "aten.__lshift__.Scalar": "aten.bitwise_left_shift.Tensor_Scalar",
    "aten.__lshift__.Tensor": "aten.bitwise_left_shift.Tensor",
    "aten.__rshift__.Scalar": "aten.bitwise_right_shift.Tensor_Scalar",
    "aten.__rshift__.Tensor": "aten.bitwise_right_shift.Tensor",
    "aten.__xor__.Scalar": "aten.bitwise_xor.Scalar",
}

_SQUEEZES = frozenset({"aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims"})
_ROUNDED = {"aten.div.Tensor_mode": "aten.div.Tensor", "aten.div.Scalar_mode": "aten.div.Scalar"}
_OUTPUTS_ARE = "outputs are tensors, numbers, strings and None, in tuples, lists and dicts"


def member_program(
    member: ExportedMember, states: ExportedStates, symbols: Mapping[Any, str]
) -> tuple[dict[str, tuple[str, torch.Tensor]], Program]:
    """Returns the weights and the program of an exported member. The graph of its export is changed in place.

    States become inputs and outputs. All other tensors of the member become weights. Raises: CaptureError.
    """
    graph = member.program.graph
    returned = _keep_outputs(member.program, states)
    drop_asserts(graph, member.module)
    inputs = _ProgramInputs(member, states)
    nodes = [_node(n, inputs.renamed, symbols, member.module) for n in graph.nodes if n.op == "call_function"]
    for n in graph.nodes:
        if n.op not in ("placeholder", "call_function", "output"):
            raise CaptureError(
                f"{member.name}: the export has a {n.op} of {n.target}, control flow that has no "
                "form in an artifact; compute all branches and choose with torch.where"
            )
    outputs = [Output(Ref(inputs.renamed.get(name, _clean(name))), "shared") for name in returned]
    program = Program(tuple(inputs.weight_slots), tuple(inputs.input_slots), tuple(nodes), tuple(outputs))
    program.check()
    if not all(_in_order(tensor) for _, tensor in inputs.weights.values()):
        program = with_reshapes(program)  # the artifact stores weights in order, where a view may need a copy
    return inputs.weights, program


def _keep_outputs(exported: torch.export.ExportedProgram, states: ExportedStates) -> list[str]:
    """Removes outputs of the graph that are not outputs of the program. Returns the names of the others."""
    specs = exported.graph_signature.output_specs
    places = [i for i, spec in enumerate(specs) if isinstance(spec.arg, TensorArgument)]
    of_result = len(states.outputs) - len(states.kept)
    kept = {places[i] for i in (*range(of_result), *states.kept)}
    output = output_of(exported)
    output.args = (tuple(a if i in kept or i not in places else None for i, a in enumerate(output.args[0])),)
    return [spec.arg.name for i, spec in enumerate(specs) if i in kept]


class _ProgramInputs:
    """What an exported graph takes: inputs of the call, then states; weights and constants.

    weights: name in the table -> (role, tensor). renamed: name of a placeholder -> name of the value in the
    program.
    """

    def __init__(self, member: ExportedMember, states: ExportedStates) -> None:
        self._member = member
        self._states = {leaf.name: leaf for leaf in states.leaves}
        self._tensors = state_tensors(member.module)
        self._by_id: dict[int, str] = {}  # tied weights: one value with several names
        self.weights: dict[str, tuple[str, torch.Tensor]] = {}
        self.weight_slots: list[Slot] = []
        self.renamed = {n.name: _clean(n.name) for n in tensor_inputs(member.program)}
        self.input_slots = [
            Slot(value, leaf.name, "shared", leaf.type)
            for value, leaf in zip(self.renamed.values(), member.call.leaves)
        ]
        placeholders = {n.name: n for n in member.program.graph.nodes}
        of_states: dict[str, str] = {}
        for spec in member.program.graph_signature.input_specs:
            if spec.kind is not InputKind.USER_INPUT:
                self._read_weight(spec, bool(placeholders[spec.arg.name].users), of_states)
        self.input_slots += [Slot(of_states[n], n, "shared", leaf.type) for n, leaf in self._states.items()]

    def _read_weight(self, spec: InputSpec, is_read: bool, of_states: dict[str, str]) -> None:
        """Adds a weight. of_states: receives the value of each state."""
        name, role, value = self._named_tensor(spec)
        placeholder = spec.arg.name
        short = re.sub(r"^([a-z]+_)member_", r"\1", placeholder) if self._member.prefix else placeholder
        if name in self._states:
            self.weights[name] = (role, value.detach())  # its first value is a row of the weights table
            of_states[name] = self.renamed[placeholder] = _clean(f"s_{short}")
        elif is_read and id(value) in self._by_id:
            self.renamed[placeholder] = self._by_id[id(value)]
        elif is_read:
            slot = Slot(_clean(f"w_{short}"), name, "shared", type_of(value))
            self.weight_slots.append(slot)
            self._by_id[id(value)] = self.renamed[placeholder] = slot.name
            self.weights[name] = (role, value.detach())

    def _named_tensor(self, spec: InputSpec) -> tuple[str, str, torch.Tensor]:
        """Returns the name, role and tensor of a parameter, buffer or constant of the export."""
        member = self._member
        kinds = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
        if spec.kind not in kinds or spec.target is None:
            raise CaptureError(_no_form_of(member.module, spec))
        name = member.own(spec.target)
        if spec.kind is not InputKind.CONSTANT_TENSOR:
            role = "parameter" if spec.kind is InputKind.PARAMETER else "buffer"
            return name, role, self._tensors[name]
        value = member.program.constants[spec.target]
        known_as = next((n for n, t in self._tensors.items() if same_memory(t, value)), "")
        if known_as:  # the member reaches a parameter by a dict or list too, which the export does not follow
            tensor = self._tensors[known_as]
            return known_as, "parameter" if isinstance(tensor, nn.Parameter) else "buffer", tensor
        plain = next((path for path, t in tensors_of(member.module) if same_memory(t, value)), "")
        # each entry has its own literals
        literal = name if member.entry == FORWARD else f"{member.entry}.{name}"
        return plain or literal, "constant", value


def _node(n: fx.Node, renamed: Mapping[str, str], symbols: Mapping[Any, str], module: nn.Module) -> Node:
    """Returns a node of the graph as a node of the program. Raises: CaptureError for an op that it may not
    have.
    """
    name = ops.name_of(n.target)
    name = _FUNCTIONAL.get(name, name)
    if name in _ROUNDED and n.kwargs.get("rounding_mode") is None:
        name = _ROUNDED[name]  # without rounding it is another op, and a keyword of None is left out below
    if not allowed(name):
        raise CaptureError(no_form(name, n.name, module, source_of(n, code=True), is_of_value(n)))

    def ref(value: fx.Node) -> Any:
        return Ref(renamed.get(value.name, _clean(value.name)))

    args = encode(fx.node.map_arg(n.args, ref))
    kwargs = {
        k: encode(fx.node.map_arg(v, ref))
        for k, v in n.kwargs.items()
        if k not in ("pin_memory", "layout") and v is not None
    }
    if name in _SQUEEZES and (ones := _squeezed(n)) is not None:
        name, args, kwargs = "aten.squeeze.dims", (ref(n.args[0]), ones), {}  # type: ignore[arg-type]
    return Node(_clean(n.name), name, tuple(args), kwargs, type_of(n.meta.get("val"), symbols), source_of(n))


def _squeezed(n: fx.Node) -> list[int] | None:
    """Returns the dims that a squeeze drops. The captured rank counts: a dynamic dim of size 1 keeps its
    place.

    None if the op names these dims and no others.
    """
    source: Any = n.args[0]
    shape = source.meta["val"].shape
    named: Any = n.args[1] if len(n.args) > 1 else n.kwargs.get("dim")
    dims = list(range(len(shape))) if named is None else [named] if isinstance(named, int) else list(named)
    ones = [d for d in dims if shape and known(shape[d]) == 1]
    return ones if named is None or (shape and ones != dims) else None


def _in_order(tensor: torch.Tensor) -> bool:
    """Whether a tensor's numbers are in memory in the order of its dims, without gaps."""
    return tensor.layout is not torch.strided or tensor.is_contiguous()


def _clean(name: str) -> str:
    return re.sub(r"\W", "_", name)


def modules_of(member: ExportedMember) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the path of the module of each node, by its name in the program, and each module's class, by
    its path.
    """
    paths: dict[str, str] = {}
    classes: dict[str, str] = {}
    for n in member.program.graph.nodes:
        for path, kind in (n.meta.get("nn_module_stack") or {}).values():
            path = member.own(f"{path}.").rstrip(".")
            name = kind if isinstance(kind, str) else kind.__qualname__
            classes[path] = name.rpartition(".")[2]
            paths[_clean(n.name)] = path
    return paths, classes


def symbols_of(member: ExportedMember) -> dict[Any, str]:
    """Returns for each symbol of a dynamic dim in the export what the inputs call it."""
    symbols: dict[Any, str] = {}
    for leaf, node in zip(member.call.leaves, tensor_inputs(member.program)):
        for axis, text in leaf.axes.items():
            expr = node.meta["val"].shape[axis]
            if isinstance(expr, torch.SymInt) and isinstance(expr.node.expr, sympy.Symbol):
                factor, letter = factor_of(text)
                symbols[expr.node.expr] = str(DimExpr(letter, factor))
    return symbols


def outputs_of(
    exported: torch.export.ExportedProgram, symbols: Mapping[Any, str], new_values: int
) -> tuple[tuple[tuple[str, str], ...], Tree, list[NewValue]]:
    """Returns (name, type) of the result's tensors, the tree of the result, and the new values of states.

    new_values: how many values the export returns beside the result.
    """
    by_name = {n.name: n for n in exported.graph.nodes}
    trees: list[_Leaf] = []
    tensors: list[NewValue] = []
    for spec in exported.graph_signature.output_specs:
        if isinstance(spec.arg, TensorArgument):
            trees.append(_Leaf({"leaf": len(tensors)}))
            node = by_name[spec.arg.name]
            tensors.append(NewValue(len(tensors), node, type_of(node.meta["val"], symbols)))
        else:
            trees.append(_Leaf({"const": _constant(spec.arg)}))
    built = pytree.tree_unflatten(trees, exported.call_spec.out_spec)
    states: list[NewValue] = []
    if new_values:
        built, beside = built
        places = [leaf.tree.get("leaf") if isinstance(leaf, _Leaf) else None for leaf in beside]
        states = [NewValue(-1, None, "") if i is None else tensors[i] for i in places]
    result = _result(built)
    named = paths(result)
    of_result = tensors[: len(tensors) - sum(n.node is not None for n in states)]
    return tuple((named.get(t.place) or "output", t.type) for t in of_result), result, states


def _constant(argument: Any) -> Any:
    """Returns an output that is not a tensor: None, a number or a string. Raises: CaptureError."""
    if not hasattr(argument, "value"):
        raise CaptureError(
            "an output is a number that depends on the inputs' sizes; return tensors, and read sizes from "
            "their shapes"
        )
    value = argument.value
    if not (value is None or isinstance(value, (bool, int, float, str))):
        raise CaptureError(f"an output is a {type(value).__name__}; {_OUTPUTS_ARE}")
    return value


def _no_form_of(module: nn.Module, spec: InputSpec) -> str:
    """The message for an object that an export reads from a member and that is no tensor."""
    name = type(module).__name__
    generators = [
        f"{path}.{key}" if path else key
        for path, part in module.named_modules()
        for key, value in vars(part).items()
        if isinstance(value, torch.Generator)
    ]
    if generators:
        return (
            f"{name} draws random numbers with a torch.Generator of its own ({some(generators)}),"
            " whose state has no form in an artifact. Draw with torch's default generator and build with"
            ' dropout="on" (--dropout on), or make what it draws an input'
        )
    kind = str(spec.kind.name).lower().replace("_", " ")
    return (
        f"{name} reads an object that is no tensor ({kind} {spec.target}, as torch.export calls it), which"
        " has no form in an artifact; keep tensors in parameters, buffers and plain attributes"
    )


@dataclass(frozen=True)
class _Leaf:
    """A leaf of the result: a tensor's number, or a constant."""

    tree: Tree


def _result(value: Any) -> Tree:
    """Returns the structure of a result as a tree; classes with named values become `Output`s."""
    if isinstance(value, _Leaf):
        return value.tree
    if value is None:
        return {"const": None}
    names = getattr(value, "_fields", None) or torch_fields(type(value))  # of a named tuple
    if isinstance(value, (list, tuple)) and names is None:
        return {"list" if isinstance(value, list) else "tuple": [_result(v) for v in value]}
    if type(value) is dict:
        return {"dict": [[k, _result(v)] for k, v in value.items()]}
    kind, rows = type(value).__name__, None
    if isinstance(value, tuple) and names is not None:
        rows = list(zip(names, value))
        kind = kind if hasattr(value, "_fields") else TORCH_TUPLE + kind
    elif isinstance(value, Mapping):
        kind, rows = value.kind if isinstance(value, Fields) else kind, list(value.items())
    elif hasattr(value, "__dataclass_fields__"):
        rows = [(k, getattr(value, k)) for k in value.__dataclass_fields__]
    if rows is None:
        raise CaptureError(f"the output is a {kind}; {_OUTPUTS_ARE}")
    return {"output": [kind, [[k, _result(v)] for k, v in rows]]}
