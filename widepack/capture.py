"""Capture: one member -> its program, guards, constants and calling convention.

requires: a fresh member in eval mode. ensures: a functional program of allowed ops whose weights are named as in the state dict; every condition under which
the export holds as arithmetic over named dims; no side effects.
"""

from __future__ import annotations

import inspect
import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch.export import Dim
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument

from widepack_artifacts.guards import letters, of_small_sizes
from widepack_artifacts.manifest import Parameter
from widepack_artifacts.opset import OPS
from widepack_artifacts.program import Node, Output, Program, Ref, Slot
from widepack_artifacts.tree import Tree, paths

from . import ops
from .codec import dtype_name, encode
from .conditions import Axis, GuardSource, Leaf, factor_of, guards_of, specializations
from .errors import CaptureError
from .explain import explain, is_specialized, source_of
from .exportable import bound_embeddings, exportable
from .values import known

_DROPOUT = {"dropout", "dropout_", "feature_dropout", "feature_dropout_", "alpha_dropout", "alpha_dropout_", "feature_alpha_dropout"}
_PLAIN = {  # lazy views and writes -> what they come to in a functional program
    "aten._conj.default": "aten.conj_physical.default",
    "aten.conj.default": "aten.conj_physical.default",
    "aten._neg_view.default": "aten.neg.default",
    "aten.zero.default": "aten.zeros_like.default",
}
_ASSERTS = {"_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range", "sym_constrain_range_for_size", "_assert_async"}


@dataclass(frozen=True)
class Captured:
    """A member as data.

    weights: program weight name in the table -> (role, tensor of the captured member). signature: (parameter, kind, tree over leaves) in the forward's order.
    result: tree over outputs. names: each output's name. dims: letter -> (least, most, source line). fixed: sentences about sizes that the code fixes.
    """

    program: Program
    weights: dict[str, tuple[str, torch.Tensor]]
    inputs: tuple[Leaf, ...]
    signature: tuple[Parameter, ...]
    outputs: tuple[tuple[str, str], ...]
    result: Tree
    dims: dict[str, tuple[int, int | None, str]]
    sizes: dict[str, int]
    guards: tuple[GuardSource, ...]
    fixed: tuple[str, ...]


@dataclass(frozen=True)
class Call:
    """A call of the member: what was given, leaf by leaf."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: tuple[Leaf, ...]
    signature: tuple[Parameter, ...]
    sizes: dict[str, int]


def arrange(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], axes: Mapping[str, Any], sizes: Mapping[str, int]) -> Call:
    """A call bound to the forward's parameters, every tensor leaf named.

    axes: {input name: {axis: letter}}, nested as the input is where it is not a tensor. sizes: {letter: its size in the example}.
    Raises: CaptureError when forward does not take these inputs.
    """
    forward = inspect.signature(module.forward)
    try:
        bound = forward.bind(*args, **kwargs)
    except TypeError as e:
        raise CaptureError(
            f"{type(module).__name__}.forward{forward} does not take the inputs {_names(args, kwargs)}: {e}; name each input as forward does"
        ) from e
    leaves: list[Leaf] = []
    signature: list[Parameter] = []
    found: dict[str, int] = dict(sizes)

    def walk(value: Any, name: str, dims: Any) -> Tree:
        if isinstance(value, torch.Tensor):
            named = {int(a) % max(value.ndim, 1) if -value.ndim <= int(a) < 0 else int(a): str(d) for a, d in (dims or {}).items()}
            leaves.append(Leaf(name, _leaf_type(value, named, name, found), value, named))
            return {"leaf": len(leaves) - 1}
        if value is None or isinstance(value, (bool, int, float, str)):
            return {"const": value}
        if isinstance(value, (list, tuple)):
            form = "list" if isinstance(value, list) else "tuple"
            return {form: [walk(v, f"{name}.{i}", dims[i] if isinstance(dims, (list, tuple)) else dims) for i, v in enumerate(value)]}
        if isinstance(value, dict):
            return {"dict": [[k, walk(v, f"{name}.{k}", dims.get(k) if isinstance(dims, dict) else None)] for k, v in value.items()]}
        raise CaptureError(
            f"input {name} is a {type(value).__name__}; inputs are tensors, numbers, strings, None, and lists, tuples and dicts of them"
        )

    positional = True  # a caller may give a parameter by position until forward forbids it, or one has no place in the signature
    for name, parameter in forward.parameters.items():
        positional = positional and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        kind = "positional" if positional else "keyword"
        if name not in bound.arguments:
            # a default belongs to the program: its place among the positions is kept, and no other value is taken for it
            if parameter.default is None or isinstance(parameter.default, (bool, int, float, str)):
                signature.append(Parameter(name, kind, {"const": parameter.default}, True))
            elif parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                positional = False
            continue
        value = bound.arguments[name]
        if parameter.kind is parameter.VAR_POSITIONAL:
            signature += [Parameter(f"{name}_{i}", "positional", walk(v, f"{name}_{i}", axes.get(f"{name}_{i}"))) for i, v in enumerate(value)]
        elif parameter.kind is parameter.VAR_KEYWORD:
            signature += [Parameter(k, "keyword", walk(v, k, axes.get(k))) for k, v in value.items()]
        else:
            shape = walk(value, name, axes.get(name))
            default = "const" in shape and type(shape["const"]) is type(parameter.default) and shape["const"] == parameter.default
            signature.append(Parameter(name, kind, shape, default))
    ordered = {p.name: kwargs[p.name] for p in signature if p.name in kwargs}
    return Call(tuple(args), ordered, tuple(leaves), tuple(signature), found)


def _names(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    return ", ".join([f"argument {i}" for i in range(len(args))] + list(kwargs)) or "(none)"


def _leaf_type(value: torch.Tensor, axes: Axis, name: str, sizes: dict[str, int]) -> str:
    """The leaf's type text; notes each letter's size and refuses one letter of two sizes."""
    shape: list[str] = [str(s) for s in value.shape]
    for axis, text in axes.items():
        if not -value.ndim <= axis < value.ndim:
            raise CaptureError(f"input {name}: axis {axis} is named {text}, but the example has {value.ndim} dims, {list(value.shape)}")
        factor, letter = factor_of(text)
        size = value.shape[axis]
        if size % factor or sizes.setdefault(letter, size // factor) != size // factor:
            raise CaptureError(
                f"input {name}: axis {axis} is {text} and has {size} in the example, but {letter} = {sizes.get(letter)} elsewhere; equal letters are equal sizes"
            )
        shape[axis] = text
    return f"{dtype_name(value.dtype)}[{','.join(shape)}]"


def capture(make: Callable[[], nn.Module], call: Call, *, asked: bool = True) -> Captured:
    """Export a fresh member.

    make: gives a fresh member in eval mode, every time. asked: the dims were named by the user, so that one which the member's code fixes is an error; else
    the size is kept, and said in `fixed`.
    Raises: CaptureError in one paragraph with the user's own source line.
    """
    module = make()
    fixed: tuple[str, ...] = ()
    try:
        exported = _export(module, call, Dim.DYNAMIC)
    except Exception as e:
        if not is_specialized(e):
            raise CaptureError(explain(e, module)) from e
        module = make()  # a failed export leaves marks on the module too
        exported, call, fixed = _with_fixed(module, call, e)
        if asked:
            raise CaptureError(
                f"{type(module).__name__} fixes a size that the inputs name as a dynamic dim: {'; '.join(fixed)}. Give that size as a number, or change the member's code"
            ) from e
    weights, program, symbols = _read(exported, module, call)
    guards = guards_of(exported, call.leaves, type(module).__name__)
    outputs, result = _outputs(exported, symbols)
    dims = _ranges(exported, call, symbols, guards)
    return Captured(program, weights, call.leaves, call.signature, outputs, result, dims, call.sizes, guards, fixed)


def _with_fixed(module: nn.Module, call: Call, error: Exception) -> tuple[torch.export.ExportedProgram, Call, tuple[str, ...]]:
    """The export with those dims static that the member's code fixes; the call without their letters; a sentence for each, with the user's line."""
    try:
        with specializations() as lines:
            exported = _export(module, call, Dim.AUTO)
    except Exception as e:  # noqa: BLE001  # whatever torch raises is explained
        raise CaptureError(explain(e, module)) from error
    by_name = {n.name: n for n in exported.graph.nodes}
    tensors = [s.arg.name for s in exported.graph_signature.input_specs if s.kind is InputKind.USER_INPUT and isinstance(s.arg, TensorArgument)]
    leaves, fixed = [], []
    gone: set[str] = set()
    for leaf, name in zip(call.leaves, tensors):
        shape = by_name[name].meta["val"].shape
        gone |= {factor_of(text)[1] for axis, text in leaf.axes.items() if known(shape[axis]) is not None}
    for leaf in call.leaves:
        here = {axis: text for axis, text in leaf.axes.items() if factor_of(text)[1] in gone}
        for axis, text in here.items():
            line = lines.get(leaf.example.shape[axis] // factor_of(text)[0], "")
            fixed.append(f"{leaf.name} has {leaf.example.shape[axis]} at axis {axis} ({text}){f', fixed by {line}' if line else ''}")
        kept = {axis: text for axis, text in leaf.axes.items() if axis not in here}
        leaves.append(replace(leaf, axes=kept, type=_leaf_type(leaf.example, kept, leaf.name, {})))
    sizes = {letter: size for letter, size in call.sizes.items() if letter not in gone}
    return exported, replace(call, leaves=tuple(leaves), sizes=sizes), tuple(fixed)


def _dynamic(module: nn.Module, call: Call, dim: Any) -> Any:
    it = iter(call.leaves)

    def spec(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return None
        leaf = next(it)
        return dict.fromkeys(leaf.axes, dim) or None

    bound = inspect.signature(module.forward).bind(*call.args, **call.kwargs)
    return {n: pytree.tree_map(spec, v) for n, v in bound.arguments.items()}


def _export(module: nn.Module, call: Call, dim: Any) -> torch.export.ExportedProgram:
    clone = lambda t: t.clone() if isinstance(t, torch.Tensor) else t  # noqa: E731  # a failed export leaves marks on its example
    args, kwargs = pytree.tree_map(clone, (call.args, call.kwargs))
    with calm():
        exported = torch.export.export(module, args, kwargs, strict=False, dynamic_shapes=_dynamic(module, call, dim))
        _drop_dropout(exported)
        bound_embeddings(exported)
        functional: torch.export.ExportedProgram = exported.run_decompositions({})
    return functional


@contextmanager
def calm() -> Iterator[None]:
    """What an export needs of torch's settings, put back afterwards."""
    validation = torch.distributions.Distribution._validate_args  # argument validation branches on data
    fast = torch.backends.mha.get_fastpath_enabled()  # its nested tensors answer differently where positions are padded
    level = logging.root.manager.disable
    torch.distributions.Distribution.set_default_validate_args(False)
    torch.backends.mha.set_fastpath_enabled(False)
    logging.disable(logging.ERROR)
    try:
        # torch prints the whole graph of an export that fails, and warns of what it does with the module's internals; the error says it in one paragraph
        with exportable(), warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
        torch.backends.mha.set_fastpath_enabled(fast)
        torch.distributions.Distribution.set_default_validate_args(validation)


def _drop_dropout(exported: torch.export.ExportedProgram) -> None:
    """Replace eval-mode dropout by its input: functionalisation would take the alias for a fresh tensor."""
    for module in exported.graph_module.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        for node in list(module.graph.nodes):
            if node.op == "call_function" and getattr(node.target, "_opname", "") in _DROPOUT and len(node.args) > 2 and node.args[2] is False:
                source = node.args[0]
                node.replace_all_uses_with(source)
                if module is exported.graph_module:
                    exported.graph_signature.replace_all_uses(node.name, source.name)
                module.graph.erase_node(node)
        module.recompile()


def _read(
    exported: torch.export.ExportedProgram, module: nn.Module, call: Call
) -> tuple[dict[str, tuple[str, torch.Tensor]], Program, dict[Any, str]]:
    signature = exported.graph_signature
    changed = [*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()]
    if changed:
        raise CaptureError(
            f"{type(module).__name__} changes {', '.join(sorted(map(str, changed)))} when it runs in eval mode; a member program has no side effects: make forward return the new value instead"
        )
    exported.graph.eliminate_dead_code()
    by_name = {n.name: n for n in exported.graph.nodes}
    weights: dict[str, tuple[str, torch.Tensor]] = {}
    slots: list[Slot] = []
    inputs: list[Slot] = []
    renamed: dict[str, str] = {}
    seen: dict[int, str] = {}
    symbols: dict[Any, str] = {}
    state = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers(remove_duplicate=False))}
    leaves = iter(call.leaves)
    for spec in signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            if not isinstance(spec.arg, TensorArgument):
                continue
            leaf = next(leaves)
            inputs.append(Slot(_clean(spec.arg.name), leaf.name, "shared", leaf.type))
            renamed[spec.arg.name] = inputs[-1].name
            for axis, text in leaf.axes.items():
                expr = by_name[spec.arg.name].meta["val"].shape[axis]
                if isinstance(expr, torch.SymInt):
                    factor, letter = factor_of(text)
                    if isinstance(expr.node.expr, sympy.Symbol):
                        symbols[expr.node.expr] = letter if factor == 1 else f"{factor}*{letter}"
            continue
        if spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR) or spec.target is None:
            raise CaptureError(f"{type(module).__name__} holds {spec.target!r}, a {spec.kind.name.lower()}, which has no form in an artifact")
        name = spec.target
        if spec.kind is InputKind.CONSTANT_TENSOR:
            value, role = exported.constants[name], "constant"
            name = constant_path(module, value) or name
        else:
            value = state[name]
            role = "parameter" if spec.kind is InputKind.PARAMETER else "buffer"
        if not by_name[spec.arg.name].users:
            continue
        if id(value) in seen:  # tied: one value with two names
            renamed[spec.arg.name] = seen[id(value)]
            continue
        slot = Slot(_clean(f"w_{spec.arg.name}"), name, "shared", f"{dtype_name(value.dtype)}[{','.join(map(str, value.shape))}]")
        slots.append(slot)
        seen[id(value)] = renamed[spec.arg.name] = slot.name
        weights[name] = (role, value.detach())
    nodes = [_node(n, renamed, symbols) for n in exported.graph.nodes if n.op == "call_function" and getattr(n.target, "_opname", "") not in _ASSERTS]
    bad = next((n for n in exported.graph.nodes if n.op not in ("placeholder", "call_function", "output")), None)
    if bad is not None:
        raise CaptureError(f"{type(module).__name__}: the export holds a {bad.op} of {bad.target}, control flow that has no form in an artifact")
    outs = []
    for spec in signature.output_specs:
        if spec.kind is not OutputKind.USER_OUTPUT:
            raise CaptureError(f"{type(module).__name__}: the export has an output of kind {spec.kind.name}, a side effect")
        if isinstance(spec.arg, TensorArgument):
            outs.append(Output(Ref(renamed.get(spec.arg.name, _clean(spec.arg.name))), "shared"))
    program = Program(tuple(slots), tuple(inputs), tuple(nodes), tuple(outs))
    program.check()
    return weights, program, symbols


def _clean(name: str) -> str:
    return re.sub(r"\W", "_", name)


def constant_path(module: nn.Module, value: torch.Tensor) -> str:
    """Where a lifted tensor lives in the member's objects (`blocks.0.freqs`), by identity; empty for a literal in the code."""
    return next((path for path, found in tensors_of(module) if found is value), "")


def tensors_of(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Every tensor in a member's plain attributes, lists, tuples and dicts included, with its path."""
    found: list[tuple[str, torch.Tensor]] = []

    def walk(value: Any, path: str, depth: int) -> None:
        if isinstance(value, torch.Tensor):
            found.append((path, value))
        elif isinstance(value, (list, tuple)) and depth:
            for i, v in enumerate(value):
                walk(v, f"{path}.{i}", depth - 1)
        elif isinstance(value, dict) and depth:
            for k, v in value.items():
                walk(v, f"{path}.{k}", depth - 1)

    for name, part in module.named_modules():
        for key, value in vars(part).items():
            if key not in ("_parameters", "_buffers", "_modules"):
                walk(value, f"{name}.{key}" if name else key, 3)
    return found


def _node(n: fx.Node, renamed: Mapping[str, str], symbols: Mapping[Any, str]) -> Node:
    name = ops.name_of(n.target)
    name = _PLAIN.get(name, name)
    source = source_of(n)
    if name not in OPS:
        raise CaptureError(f"node {n.name} is {name}, {f'from {source}, ' if source else ''}an op that widepack does not know; please report it")

    def ref(value: fx.Node) -> Any:
        return Ref(renamed.get(value.name, _clean(value.name)))

    if name == "aten.squeeze.default":  # the rank is the captured one: a batch of 1 is no dim to drop
        value: Any = n.args[0]
        ones = [d for d, size in enumerate(value.meta["val"].shape) if known(size) == 1]
        return Node(_clean(n.name), "aten.squeeze.dims", (ref(value), ones), {}, _type(n.meta.get("val"), symbols), source)

    args = encode(fx.node.map_arg(n.args, ref))
    kwargs = {k: encode(fx.node.map_arg(v, ref)) for k, v in n.kwargs.items() if k not in ("pin_memory", "layout") and v is not None}
    return Node(_clean(n.name), name, tuple(args), kwargs, _type(n.meta.get("val"), symbols), source)


def _type(value: Any, symbols: Mapping[Any, str]) -> str:
    if isinstance(value, torch.Tensor):
        return f"{dtype_name(value.dtype)}[{','.join(_size(s, symbols) for s in value.shape)}]"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_type(v, symbols) for v in value)})"
    return "int" if isinstance(value, (int, torch.SymInt)) else type(value).__name__


def _size(size: Any, symbols: Mapping[Any, str]) -> str:
    if isinstance(size, int):
        return str(size)
    expr = size.node.expr
    return str(expr.xreplace({s: sympy.Symbol(letter) for s, letter in symbols.items()})).replace(" ", "")


def _outputs(exported: torch.export.ExportedProgram, symbols: Mapping[Any, str]) -> tuple[tuple[tuple[str, str], ...], Tree]:
    specs = exported.graph_signature.output_specs
    by_name = {n.name: n for n in exported.graph.nodes}
    numbers: list[Any] = []
    types: list[str] = []
    for spec in specs:
        if isinstance(spec.arg, TensorArgument):
            numbers.append({"leaf": len(types)})
            types.append(_type(by_name[spec.arg.name].meta["val"], symbols))
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
    result = _result(pytree.tree_unflatten(marks, exported.call_spec.out_spec), "output")
    named = paths(result)
    return tuple((named.get(i) or "output", t) for i, t in enumerate(types)), result


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
    if type(value) is dict:
        return {"dict": [[k, _result(v, k)] for k, v in value.items()]}
    if isinstance(value, Mapping):
        return {"output": [type(value).__name__, [[k, _result(v, k)] for k, v in value.items()]]}
    if hasattr(value, "__dataclass_fields__"):
        return {"output": [type(value).__name__, [[k, _result(getattr(value, k), k)] for k in value.__dataclass_fields__]]}
    raise CaptureError(f"the output is a {type(value).__name__}; outputs are tensors, numbers, strings and None, in tuples, lists and dicts")


def _ranges(
    exported: torch.export.ExportedProgram, call: Call, symbols: Mapping[Any, str], guards: Sequence[GuardSource]
) -> dict[str, tuple[int, int | None, str]]:
    """Each letter's bounds as far as export knows them. A lower bound of 2, or one out of conditions on small sizes, may be export's own, not the member's."""
    asked = {letter for g in guards if of_small_sizes(g.expr) for letter in letters(g.expr)}
    bounds: dict[str, tuple[int, int | None, str]] = dict.fromkeys(call.sizes, (1, None, ""))
    for symbol, range_ in exported.range_constraints.items():
        letter = symbols.get(symbol, "")
        if letter in bounds:
            least, most, _ = bounds[letter]
            low = int(range_.lower) if range_.lower.is_Integer and int(range_.lower) > 2 and letter not in asked else 1
            high = int(range_.upper) if range_.upper.is_Integer else None
            bounds[letter] = (max(least, low), high if most is None else most if high is None else min(most, high), "")
    return bounds
