"""The export of a member as a program: its weights by the names of the state dict, its nodes, its outputs as a tree."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch.export.graph_signature import InputKind, TensorArgument

from widepack_artifacts.opset import allowed
from widepack_artifacts.program import Node, Output, Program, Ref, Slot
from widepack_artifacts.tree import Tree, paths

from ..ir import ops
from .call import Call
from .state import Found, New
from ..ir.encoding import dtype_name, encode, type_of
from .guards import factor_of
from .effects import drop_asserts
from ..spec.entries import FORWARD
from ..errors import CaptureError
from .explain import no_form, source_of
from .module_tensors import constant_path, state_name
from .results import Fields
from ..ir.values import known

_FUNCTIONAL = {  # writes and operators -> what they come to in a functional program
    "aten.zero.default": "aten.zeros_like.default",
    "aten.item.default": "aten._local_scalar_dense.default",
    "aten.__lshift__.Scalar": "aten.bitwise_left_shift.Tensor_Scalar",
    "aten.__lshift__.Tensor": "aten.bitwise_left_shift.Tensor",
    "aten.__rshift__.Scalar": "aten.bitwise_right_shift.Tensor_Scalar",
    "aten.__rshift__.Tensor": "aten.bitwise_right_shift.Tensor",
    "aten.__xor__.Scalar": "aten.bitwise_xor.Scalar",
}

_ROUNDED = {"aten.div.Tensor_mode": "aten.div.Tensor", "aten.div.Scalar_mode": "aten.div.Scalar"}


def member_program(
    exported: torch.export.ExportedProgram, module: nn.Module, call: Call, entry: str, prefix: str, found: Found, symbols: Mapping[Any, str]
) -> tuple[dict[str, tuple[str, torch.Tensor]], Program]:
    """The export as a member program: states are inputs and outputs, all else that the member holds is a weight."""
    signature = exported.graph_signature
    places = [i for i, spec in enumerate(signature.output_specs) if isinstance(spec.arg, TensorArgument)]
    kept = {places[i] for i in (*range(len(found.outputs) - len(found.kept)), *found.kept)}
    (output,) = (n for n in exported.graph.nodes if n.op == "output")
    output.args = (tuple(a if i in kept or i not in places else None for i, a in enumerate(output.args[0])),)
    drop_asserts(exported.graph, module)
    by_name = {n.name: n for n in exported.graph.nodes}
    weights: dict[str, tuple[str, torch.Tensor]] = {}
    slots: list[Slot] = []
    inputs: list[Slot] = []
    renamed: dict[str, str] = {}
    seen: dict[int, str] = {}
    tensors = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers(remove_duplicate=False))}
    carried = {leaf.name: leaf for leaf in found.leaves}
    leaves = iter(call.leaves)
    for spec in signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            if not isinstance(spec.arg, TensorArgument):
                continue
            leaf = next(leaves)
            inputs.append(Slot(_clean(spec.arg.name), leaf.name, "shared", leaf.type))
            renamed[spec.arg.name] = inputs[-1].name
            continue
        if spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR) or spec.target is None:
            raise CaptureError(f"{type(module).__name__} holds {spec.target!r}, a {spec.kind.name.lower()}, which has no form in an artifact")
        name = spec.target.removeprefix(prefix)
        if spec.kind is InputKind.CONSTANT_TENSOR:
            value, role = exported.constants[spec.target], "constant"
            known_as = state_name(tensors, value)
            if known_as:  # a parameter reached by a second path, a dict or a list that the export does not follow
                name, value, role = known_as, tensors[known_as], "parameter" if isinstance(tensors[known_as], nn.Parameter) else "buffer"
            else:
                name = constant_path(module, value) or (name if entry == FORWARD else f"{entry}.{name}")  # every entry has literals of its own
        else:
            value = tensors[name]
            role = "parameter" if spec.kind is InputKind.PARAMETER else "buffer"
        short = re.sub(r"^([a-z]+_)member_", r"\1", spec.arg.name) if prefix else spec.arg.name
        if name in carried:
            weights[name] = (role, value.detach())  # what it begins as is a row of the table
            renamed[spec.arg.name] = _clean(f"s_{short}")
            continue
        if not by_name[spec.arg.name].users:
            continue
        if id(value) in seen:  # tied: one value with two names
            renamed[spec.arg.name] = seen[id(value)]
            continue
        slot = Slot(_clean(f"w_{short}"), name, "shared", f"{dtype_name(value.dtype)}[{','.join(map(str, value.shape))}]")
        slots.append(slot)
        seen[id(value)] = renamed[spec.arg.name] = slot.name
        weights[name] = (role, value.detach())
    at = {s.target.removeprefix(prefix): renamed[s.arg.name] for s in signature.input_specs if s.target and s.arg.name in renamed}
    inputs += [Slot(at[name], name, "shared", leaf.type) for name, leaf in carried.items()]
    nodes = [_node(n, renamed, symbols, module) for n in exported.graph.nodes if n.op == "call_function"]
    bad = next((n for n in exported.graph.nodes if n.op not in ("placeholder", "call_function", "output")), None)
    if bad is not None:
        raise CaptureError(f"{type(module).__name__}: the export holds a {bad.op} of {bad.target}, control flow that has no form in an artifact")
    outs = []
    for i, spec in enumerate(signature.output_specs):
        if i in kept:
            outs.append(Output(Ref(renamed.get(spec.arg.name, _clean(spec.arg.name))), "shared"))
    program = Program(tuple(slots), tuple(inputs), tuple(nodes), tuple(outs))
    program.check()
    return weights, program


def _node(n: fx.Node, renamed: Mapping[str, str], symbols: Mapping[Any, str], module: nn.Module) -> Node:
    name = ops.name_of(n.target)
    name = _FUNCTIONAL.get(name, name)
    if name in _ROUNDED and n.kwargs.get("rounding_mode") is None:  # not rounded, which is another op: a keyword of None is left out below
        name = _ROUNDED[name]
    source = source_of(n)
    if not allowed(name):
        raise CaptureError(no_form(name, n.name, module, source_of(n, code=True)))

    def ref(value: fx.Node) -> Any:
        return Ref(renamed.get(value.name, _clean(value.name)))

    if name == "aten.squeeze.default":  # the rank is the captured one: a batch of 1 is no dim to drop
        value: Any = n.args[0]
        ones = [d for d, size in enumerate(value.meta["val"].shape) if known(size) == 1]
        return Node(_clean(n.name), "aten.squeeze.dims", (ref(value), ones), {}, type_of(n.meta.get("val"), symbols), source)

    args = encode(fx.node.map_arg(n.args, ref))
    kwargs = {k: encode(fx.node.map_arg(v, ref)) for k, v in n.kwargs.items() if k not in ("pin_memory", "layout") and v is not None}
    return Node(_clean(n.name), name, tuple(args), kwargs, type_of(n.meta.get("val"), symbols), source)


def _clean(name: str) -> str:
    return re.sub(r"\W", "_", name)


def symbols_of(exported: torch.export.ExportedProgram, call: Call) -> dict[Any, str]:
    """The dims of the export as the inputs name them."""
    by_name = {n.name: n for n in exported.graph.nodes}
    symbols: dict[Any, str] = {}
    specs = [s for s in exported.graph_signature.input_specs if s.kind is InputKind.USER_INPUT and isinstance(s.arg, TensorArgument)]
    for leaf, spec in zip(call.leaves, specs):
        for axis, text in leaf.axes.items():
            expr = by_name[spec.arg.name].meta["val"].shape[axis]
            if isinstance(expr, torch.SymInt) and isinstance(expr.node.expr, sympy.Symbol):
                factor, letter = factor_of(text)
                symbols[expr.node.expr] = letter if factor == 1 else f"{factor}*{letter}"
    return symbols


def outputs_of(exported: torch.export.ExportedProgram, symbols: Mapping[Any, str], news: int) -> tuple[tuple[tuple[str, str], ...], Tree, list[New]]:
    """(name, type) of the result's leaves, and its tree; and, of what stands beside the result, the last `news` values."""
    specs = exported.graph_signature.output_specs
    by_name = {n.name: n for n in exported.graph.nodes}
    numbers: list[Any] = []
    types: list[str] = []
    nodes: list[fx.Node] = []
    for spec in specs:
        if isinstance(spec.arg, TensorArgument):
            numbers.append({"leaf": len(types)})
            nodes.append(by_name[spec.arg.name])
            types.append(type_of(nodes[-1].meta["val"], symbols))
        else:
            if not hasattr(spec.arg, "value"):
                raise CaptureError("an output is a number that depends on the inputs' sizes; return tensors, and read sizes from their shapes")
            value = spec.arg.value
            if not (value is None or isinstance(value, (bool, int, float, str))):
                raise CaptureError(
                    f"an output is a {type(value).__name__}; outputs are tensors, numbers, strings and None, in tuples, lists and dicts"
                )
            numbers.append({"const": value})
    marks = [_Mark(n) for n in numbers]
    built = pytree.tree_unflatten(marks, exported.call_spec.out_spec)
    made: list[New] = []
    if news:
        built, beside = built
        for mark in beside:
            i = mark.tree.get("leaf") if isinstance(mark, _Mark) else None
            made.append(New(-1, None, "") if i is None else New(i, nodes[i], types[i]))
    result = _result(built, "output")
    named = paths(result)
    own = types[: len(types) - sum(n.node is not None for n in made)]
    return tuple((named.get(i) or "output", t) for i, t in enumerate(own)), result, made


@dataclass(frozen=True)
class _Mark:
    tree: Tree


def _result(value: Any, name: str) -> Tree:
    """The shape of a result as a tree; classes that hold named values become `Output`s."""
    if isinstance(value, _Mark):
        return value.tree
    if value is None:
        return {"const": None}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {"output": [type(value).__name__, [[k, _result(v, k)] for k, v in zip(value._fields, value)]]}
    if isinstance(value, (list, tuple)):
        return {"list" if isinstance(value, list) else "tuple": [_result(v, name) for v in value]}
    if isinstance(value, Fields):
        return {"output": [value.kind, [[k, _result(v, k)] for k, v in value.items()]]}
    if type(value) is dict:
        return {"dict": [[k, _result(v, k)] for k, v in value.items()]}
    if isinstance(value, Mapping):
        return {"output": [type(value).__name__, [[k, _result(v, k)] for k, v in value.items()]]}
    if hasattr(value, "__dataclass_fields__"):
        return {"output": [type(value).__name__, [[k, _result(getattr(value, k), k)] for k in value.__dataclass_fields__]]}
    raise CaptureError(f"the output is a {type(value).__name__}; outputs are tensors, numbers, strings and None, in tuples, lists and dicts")
