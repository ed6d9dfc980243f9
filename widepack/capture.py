"""Capture: one member -> its program, guards, constants and calling convention.

requires: a fresh member in eval mode. ensures: a functional program of allowed ops whose weights are named as in the state dict; every condition under which
the export holds as arithmetic over named dims; no side effects.
"""

from __future__ import annotations

import ast
import inspect
import re
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sympy
import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import Dim
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument
from widepack_artifacts.guards import Expr
from widepack_artifacts.opset import OPS
from widepack_artifacts.program import Node, Output, Program, Ref, Slot
from widepack_artifacts.tree import Tree

from . import ops
from .codec import dtype_name, encode
from .errors import CaptureError

_DROPOUT = {"dropout", "dropout_", "feature_dropout", "feature_dropout_", "alpha_dropout", "alpha_dropout_", "feature_alpha_dropout"}
_ASSERTS = {"_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range", "sym_constrain_range_for_size", "_assert_async"}
Axis = Mapping[int, str]  # axis -> "B" or "32*H"


@dataclass(frozen=True, slots=True)
class Leaf:
    """One tensor of a call: its name, type text, example, and which axes are dynamic."""

    name: str
    type: str
    example: torch.Tensor
    axes: Axis


@dataclass(frozen=True, slots=True)
class GuardSource:
    expr: Expr
    source: str


@dataclass(frozen=True)
class Captured:
    """A member as data.

    weights: program weight name in the table -> (role, tensor of the captured member). signature: (parameter, kind, tree over leaves) in the forward's order.
    result: tree over outputs. names: each output's name. dims: letter -> (least, most, source line). fixed: sentences about sizes that the code fixes.
    """

    program: Program
    weights: dict[str, tuple[str, torch.Tensor]]
    inputs: tuple[Leaf, ...]
    signature: tuple[tuple[str, str, Tree], ...]
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
    signature: tuple[tuple[str, str, Tree], ...]
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
    signature: list[tuple[str, str, Tree]] = []
    found: dict[str, int] = dict(sizes)

    def walk(value: Any, name: str, dims: Any) -> Tree:
        if isinstance(value, torch.Tensor):
            named = {int(a): str(d) for a, d in (dims or {}).items()}
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

    for name, value in bound.arguments.items():
        kind = forward.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            signature += [(f"{name}_{i}", "positional", walk(v, f"{name}_{i}", axes.get(f"{name}_{i}"))) for i, v in enumerate(value)]
        elif kind is inspect.Parameter.VAR_KEYWORD:
            signature += [(k, "keyword", walk(v, k, axes.get(k))) for k, v in value.items()]
        else:
            positional = name not in kwargs and kind is not inspect.Parameter.KEYWORD_ONLY
            signature.append((name, "positional" if positional else "keyword", walk(value, name, axes.get(name))))
    ordered = {n: bound.arguments.get(n, kwargs.get(n)) for n, k, _ in signature if k == "keyword"}
    return Call(bound.args if not ordered else tuple(args), {k: kwargs.get(k, v) for k, v in ordered.items()}, tuple(leaves), tuple(signature), found)


def _names(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    return ", ".join([f"argument {i}" for i in range(len(args))] + list(kwargs)) or "(none)"


def _leaf_type(value: torch.Tensor, axes: Axis, name: str, sizes: dict[str, int]) -> str:
    """The leaf's type text; notes each letter's size and refuses one letter of two sizes."""
    shape: list[str] = [str(s) for s in value.shape]
    for axis, text in axes.items():
        if not -value.ndim <= axis < value.ndim:
            raise CaptureError(f"input {name}: axis {axis} is named {text}, but the example has {value.ndim} dims, {list(value.shape)}")
        factor, letter = _factor(text)
        size = value.shape[axis]
        if size % factor or sizes.setdefault(letter, size // factor) != size // factor:
            raise CaptureError(
                f"input {name}: axis {axis} is {text} and has {size} in the example, but {letter} = {sizes.get(letter)} elsewhere; equal letters are equal sizes"
            )
        shape[axis] = text
    return f"{dtype_name(value.dtype)}[{','.join(shape)}]"


def _factor(text: str) -> tuple[int, str]:
    head, _, tail = text.partition("*")
    return (int(head), tail) if tail else (1, head)


def capture(module: nn.Module, call: Call, *, asked: bool = True) -> Captured:
    """Export a fresh member in eval mode.

    asked: the dims were named by the user, so that one which the member's code fixes is an error; else the size is kept and said.
    Raises: CaptureError in one paragraph with the user's own source line.
    """
    fixed: tuple[str, ...] = ()
    exported = _export(module, call)
    program_weights, program, symbols = _read(exported, module, call)
    letters = {s: l for s, l in symbols.items()}
    guards = _guards(exported, call, module)
    outputs, result = _outputs(exported, letters)
    dims = _ranges(exported, call, letters)
    return Captured(program, program_weights, call.leaves, call.signature, outputs, result, dims, call.sizes, guards, fixed)


def _dynamic(module: nn.Module, call: Call) -> Any:
    it = iter(call.leaves)

    def spec(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return None
        leaf = next(it)
        return {a: Dim.DYNAMIC for a in leaf.axes} or None

    bound = inspect.signature(module.forward).bind(*call.args, **call.kwargs)
    return {n: pytree.tree_map(spec, v) for n, v in bound.arguments.items()}


def _export(module: nn.Module, call: Call) -> torch.export.ExportedProgram:
    clone = lambda t: t.clone() if isinstance(t, torch.Tensor) else t  # noqa: E731  # a failed export leaves marks on its example
    args, kwargs = pytree.tree_map(clone, (call.args, call.kwargs))
    validation = torch.distributions.Distribution._validate_args  # argument validation branches on data
    torch.distributions.Distribution.set_default_validate_args(False)
    fast = torch.backends.mha.get_fastpath_enabled()  # its nested tensors answer differently where positions are padded
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, about what export does with the module's internals
            exported = torch.export.export(module, args, kwargs, strict=False, dynamic_shapes=_dynamic(module, call))
            _drop_dropout(exported)
            functional: torch.export.ExportedProgram = exported.run_decompositions({})
            return functional
    except Exception as e:
        raise CaptureError(explain(e, module)) from e
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        torch.distributions.Distribution.set_default_validate_args(validation)


def explain(error: Exception, module: nn.Module) -> str:
    """Why a member could not be exported, with the user's own line and what to change."""
    text = str(error)
    frame = user_frame(traceback.extract_tb(error.__traceback__))
    where = f" at {frame}" if frame else ""
    name = type(module).__name__
    if "specialized" in text or "Constraints violated" in text or "not all values" in text.lower():
        lines = [line.strip() for line in text.splitlines() if "specialized" in line or "solution" in line or "- " in line]
        return f"{name} fixes a size that was named as a dynamic dim{where}: {' '.join(lines)[:600]} Give that size as a number in --input, or change the member's code"
    if "data-dependent" in text or "Could not guard" in text or "Could not extract specialized integer" in text or "_local_scalar_dense" in text:
        return f"{name} branches on the values of a tensor{where}, which no export can follow: {text.splitlines()[0][:300]} Replace the branch by torch.where, or the .item() by tensor arithmetic"
    return f"{name} cannot be exported by torch.export{where}: {type(error).__name__}: {text.strip().splitlines()[0][:400] if text.strip() else ''}"


def user_frame(frames: Sequence[traceback.FrameSummary]) -> str:
    """The last line of user code in a stack: `net.py:12 in forward: x.item()`."""
    roots = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    own = [f for f in frames if not f.filename.startswith(roots) and "<" not in f.filename]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno} in {own[-1].name}: {own[-1].line}" if own else ""


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
                    factor, letter = _factor(text)
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
    source = source_of(n)
    if name not in OPS:
        raise CaptureError(f"node {n.name} is {name}, {f'from {source}, ' if source else ''}an op that widepack does not know; please report it")

    def ref(value: fx.Node) -> Any:
        return Ref(renamed.get(value.name, _clean(value.name)))

    args = encode(fx.node.map_arg(n.args, ref))
    kwargs = {k: encode(fx.node.map_arg(v, ref)) for k, v in n.kwargs.items() if k not in ("pin_memory", "layout") and v is not None}
    return Node(_clean(n.name), name, tuple(args), kwargs, _type(n.meta.get("val"), symbols), source)


def source_of(n: fx.Node) -> str:
    """The user's own line of a node: `net.py:12, in forward`."""
    found = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', n.meta.get("stack_trace") or "")
    root = str(Path(torch.__file__).parent)
    own = [f for f in found if not f[0].startswith(root)] or found
    return f"{Path(own[-1][0]).name}:{own[-1][1]} in {own[-1][2]}" if own else ""


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
    return str(expr.xreplace({s: sympy.Symbol(l) for s, l in symbols.items()})).replace(" ", "")


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
            value = getattr(spec.arg, "value", None)
            if not (value is None or isinstance(value, (bool, int, float, str))):
                raise CaptureError(
                    f"an output is a {type(value).__name__}; outputs are tensors, numbers, strings and None, in tuples, lists and dicts"
                )
            numbers.append({"const": value})
    marks = [_Mark(n) for n in numbers]
    result = _result(pytree.tree_unflatten(marks, exported.call_spec.out_spec), "output")
    from widepack_artifacts.tree import paths

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


def _ranges(exported: torch.export.ExportedProgram, call: Call, symbols: Mapping[Any, str]) -> dict[str, tuple[int, int | None, str]]:
    """Each letter's bounds as far as export knows them. A lower bound of 2 is export's own, not the member's."""
    bounds: dict[str, tuple[int, int | None, str]] = {letter: (1, None, "") for letter in call.sizes}
    for symbol, range_ in exported.range_constraints.items():
        letter = symbols.get(symbol, "")
        if letter in bounds:
            least, most, _ = bounds[letter]
            low = int(range_.lower) if range_.lower.is_Integer and int(range_.lower) > 2 else 1
            high = int(range_.upper) if range_.upper.is_Integer else None
            bounds[letter] = (max(least, low), high if most is None else most if high is None else min(most, high), "")
    return bounds


def _guards(exported: torch.export.ExportedProgram, call: Call, module: nn.Module) -> tuple[GuardSource, ...]:
    """Every condition of the export as arithmetic over named dims. Raises: CaptureError for one that cannot be written so."""
    codes = getattr(exported, "_guards_code", None)
    if codes is None:
        raise CaptureError(f"torch {torch.__version__} does not tell under which conditions an export holds; widepack needs torch 2.11 or newer")
    leaves = {leaf.name: leaf for leaf in call.leaves}
    sources = _guard_sources(exported)
    made: dict[str, GuardSource] = {}
    for code in codes:
        try:
            expr = _expr(ast.parse(code.strip(), mode="eval").body, leaves)
        except (SyntaxError, ValueError) as e:
            raise CaptureError(
                f"{type(module).__name__} holds only while {code!r}, a condition that cannot be written as arithmetic over named dims ({e}); change the member's code"
            ) from e
        if isinstance(expr, bool) or expr[1] == expr[2] and expr[0] in ("eq", "le", "ge"):
            if expr is False:
                raise CaptureError(f"{type(module).__name__}: the condition {code!r} does not hold for the example")
            continue
        numbers = set(re.findall(r"(?<![a-z\[\d])\d+(?![\]\d])", code))
        made.setdefault(str(expr), GuardSource(expr, next((where for found, where in sources if found - {"0", "1"} and found <= numbers), "")))
    return tuple(made.values())


def _guard_sources(exported: torch.export.ExportedProgram) -> list[tuple[set[str], str]]:
    """The numbers in each of the shape environment's conditions, and the user's line that it comes from."""
    values = [n.meta.get("val") for n in exported.graph.nodes if n.op == "placeholder"]
    modes = [v.fake_mode for v in values if isinstance(v, FakeTensor)]
    if not modes or modes[0].shape_env is None:
        return []
    rows = []
    for guard in modes[0].shape_env.guards:
        frame = getattr(guard.sloc, "framework_loc", None)
        name = getattr(frame, "filename", "") or ""
        if frame is not None and name and not name.startswith(str(Path(torch.__file__).parent)):
            rows.append((set(re.findall(r"(?<![a-z\d])\d+", str(guard.expr))), f"{Path(name).name}:{frame.lineno} in {frame.name}"))
    return rows


_COMPARE = {ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge"}
_ARITHMETIC = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.FloorDiv: "floordiv", ast.Mod: "mod"}


def _expr(node: ast.expr, leaves: Mapping[str, Leaf]) -> Expr:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, bool)):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return [_ARITHMETIC[type(node.op)], _expr(node.left, leaves), _expr(node.right, leaves)]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return ["not", _expr(node.operand, leaves)]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return ["sub", 0, _expr(node.operand, leaves)]
    if isinstance(node, ast.BoolOp):
        parts = [_expr(v, leaves) for v in node.values]
        made = parts[0]
        for part in parts[1:]:
            made = ["and" if isinstance(node.op, ast.And) else "or", made, part]
        return made
    if isinstance(node, ast.Compare) and all(type(o) in _COMPARE for o in node.ops):
        sides = [_expr(v, leaves) for v in (node.left, *node.comparators)]
        pairs = [[_COMPARE[type(o)], a, b] for o, a, b in zip(node.ops, sides, sides[1:])]
        made = pairs[0]
        for pair in pairs[1:]:
            made = ["and", made, pair]
        return made
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("max", "min", "Max", "Min") and len(node.args) == 2:
        return [node.func.id.lower(), *(_expr(a, leaves) for a in node.args)]
    if isinstance(node, ast.Subscript):
        return _size_of(node, leaves)
    raise ValueError(f"{ast.unparse(node)} is no arithmetic over sizes")


def _size_of(node: ast.Subscript, leaves: Mapping[str, Leaf]) -> Expr:
    """`L['x'].size()[1]`, also of a nested input, as its letter."""
    call = node.value
    if not (
        isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "size" and isinstance(node.slice, ast.Constant)
    ):
        raise ValueError(f"{ast.unparse(node)} is no size of an input")
    parts: list[str] = []
    at: ast.expr = call.func.value
    while isinstance(at, ast.Subscript):
        if not isinstance(at.slice, ast.Constant):
            raise ValueError(f"{ast.unparse(node)} is no size of an input")
        parts.insert(0, str(at.slice.value))
        at = at.value
    leaf = leaves.get(".".join(parts)) or leaves.get("_".join(parts))
    axis = int(str(node.slice.value))
    if leaf is None:
        raise ValueError(f"{ast.unparse(node)} is of no input that is known")
    if axis not in leaf.axes:
        return int(leaf.example.shape[axis])
    factor, letter = _factor(leaf.axes[axis])
    return letter if factor == 1 else ["mul", factor, letter]
