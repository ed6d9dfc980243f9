"""Capture: one member -> its program, guards, constants and calling convention.

requires: a fresh member in eval mode. ensures: a functional program of allowed ops whose weights are named as in the state dict; every condition under which
the export holds as arithmetic over named dims; no side effects.
"""

from __future__ import annotations

import inspect
import io
import itertools
import logging
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch.export import Dim
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument

from widepack_artifacts import guards as guard_forms
from widepack_artifacts.guards import letters, of_small_sizes
from widepack_artifacts.manifest import Parameter
from widepack_artifacts.opset import OPS
from widepack_artifacts.program import Node, Output, Program, Ref, Slot
from widepack_artifacts.tree import Tree, paths

from . import ops, taken_apart
from .attributes import attributes_of
from .carrying import MEMBER, Found, New, Traced, Wanted, assignments, carried_by, wanted_of
from .codec import dtype_name, encode, type_of
from .conditions import Axis, GuardSource, Leaf, bound_line, factor_of, guards_of, lines_of, names_of, place_of
from .entries import FORWARD, method_of
from .errors import CaptureError
from .explain import explain, is_specialized, no_form, source_of, user_line, way_out
from .exportable import bound_embeddings, by_places, exportable
from .state import Asked, Carried, without
from .trial import Trial, why_not
from .values import known
from .watching import Seen, watched

_DROPOUT = {"dropout", "dropout_", "feature_dropout", "feature_dropout_", "alpha_dropout", "alpha_dropout_", "feature_alpha_dropout"}
_PLAIN = {  # writes and operators -> what they come to in a functional program
    "aten.zero.default": "aten.zeros_like.default",
    "aten.__lshift__.Scalar": "aten.bitwise_left_shift.Tensor_Scalar",
    "aten.__rshift__.Scalar": "aten.bitwise_right_shift.Tensor_Scalar",
    "aten.__xor__.Scalar": "aten.bitwise_xor.Scalar",
}
_READS = {"item", "_local_scalar_dense"}
_OWN_CHECK = re.compile(r"expression u\d+ (>= 0|<= 1) on node")  # torch's of a truth value
_ASSERTS = {"_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range", "sym_constrain_range_for_size", "_assert_async"}


@dataclass(frozen=True)
class Captured:
    """A member as data.

    weights: program weight name in the table -> (role, tensor of the captured member). inputs: the leaves of a call, then the buffers that are states.
    signature: (parameter, kind, tree over leaves) in the forward's order. outputs: (name, type) of the result's leaves, then of states that are in no result.
    result: tree over outputs, without those of states; returned: with them. dims: letter -> (least, most, source line). fixed: sentences about sizes that the
    code fixes. states: what the caller carries. attributes: the plain attributes of the module that was exported, before it was; None where there is none.
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
    returned: Tree
    states: tuple[Carried, ...] = ()
    unchanged: frozenset[str] = frozenset()  # buffers asked for that this entry leaves as they are
    attributes: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Call:
    """A call of the member: what was given, leaf by leaf."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: tuple[Leaf, ...]
    signature: tuple[Parameter, ...]
    sizes: dict[str, int]


def arrange(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], axes: Mapping[str, Any], sizes: Mapping[str, int], entry: str = FORWARD
) -> Call:
    """A call bound to the parameters of forward, or of the method that is the entry, every tensor leaf named.

    axes: {input name: {axis: letter}}, nested as the input is where it is not a tensor. sizes: {letter: its size in the example}.
    Raises: CaptureError when the method does not take these inputs.
    """
    forward = inspect.signature(method_of(module, entry))
    try:
        bound = forward.bind(*args, **kwargs)
    except TypeError as e:
        raise CaptureError(
            f"{type(module).__name__}.{entry}{forward} does not take the inputs {_names(args, kwargs)}: {e}; name each input as {entry} does"
            + (
                ""
                if entry == FORWARD
                else f", and with several entries write {entry}:{next(iter(forward.parameters), 'x')}=... for one of them alone"
            )
        ) from e
    leaves: list[Leaf] = []
    signature: list[Parameter] = []
    found: dict[str, int] = dict(sizes)

    def walk(value: Any, name: str, dims: Any) -> Tree:
        if isinstance(value, torch.Tensor):
            named = {int(a) % max(value.ndim, 1) if -value.ndim <= int(a) < 0 else int(a): str(d) for a, d in (dims or {}).items()}
            named = {a: _own_letter(d, value.shape[a], found) if 0 <= a < value.ndim else d for a, d in named.items()}
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
            for i, v in enumerate(value):
                every = axes.get(name)  # of all positions, or a list with one entry each
                own = every[i] if isinstance(every, (list, tuple)) and i < len(every) else every
                signature.append(Parameter(f"{name}_{i}", "positional", walk(v, f"{name}_{i}", axes.get(f"{name}_{i}", own))))
        elif parameter.kind is parameter.VAR_KEYWORD:
            signature += [Parameter(k, "keyword", walk(v, k, axes.get(k))) for k, v in value.items()]
        else:
            shape = walk(value, name, axes.get(name))
            default = "const" in shape and type(shape["const"]) is type(parameter.default) and shape["const"] == parameter.default
            signature.append(Parameter(name, kind, shape, default))
    ordered = {p.name: kwargs[p.name] for p in signature if p.name in kwargs}
    return Call(tuple(args), ordered, tuple(leaves), tuple(signature), found)


def _own_letter(text: str, size: int, sizes: Mapping[str, int]) -> str:
    """The dim's own letter: one that the example holds at two sizes is two dims, `B` and `B2`. Nothing is tied then that the user may have meant to be equal."""
    factor, letter = factor_of(text)
    if size % factor or sizes.get(letter, size // factor) == size // factor:
        return text
    free = next(other for k in itertools.count(2) if sizes.get(other := f"{letter}{k}", size // factor) == size // factor)
    return free if factor == 1 else f"{factor}*{free}"


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


def capture(make: Callable[[], nn.Module], call: Call, *, asked: bool = True, entry: str = FORWARD, states: Sequence[Asked] = ()) -> Captured:
    """Export a fresh member.

    make: gives a fresh member in eval mode, every time. asked: the dims were named by the user, so that one which the member's code fixes is an error; else
    the size is kept, and said in `fixed`. entry: the method to export. states: what the caller shall carry, where the entry has it.
    Raises: CaptureError in one paragraph with the user's own source line.
    """
    wanted = Wanted((), (), {})
    module = make()
    if states:
        wanted = wanted_of(module, call.leaves, call.signature, entry, states)
        _refuse_shared_memory(module, wanted.buffers)

    def traced(module: nn.Module) -> nn.Module:
        direct = entry == FORWARD and not wanted.buffers and not wanted.leaves
        return module if direct else Traced(module, entry, wanted.buffers, wanted.leaves)

    _run_once(make(), call, entry)  # another one: the module that is captured is the one whose attributes are known
    attributes = attributes_of(module)
    fixed: tuple[str, ...] = ()
    with assignments(module) as assigned:
        root = traced(module)
        with watched() as seen:
            try:
                exported = _export(root, call, Dim.DYNAMIC)
            except Exception as e:
                if not is_specialized(e):
                    raise CaptureError(_why(e, make(), call, entry, seen)) from e
                error: Exception | None = e
            else:
                error = None
    if error is not None:
        module = make()  # a failed export leaves marks on the module too
        attributes = attributes_of(module)
        with assignments(module) as assigned:
            root = traced(module)
            exported, kept, fixed, seen = _with_fixed(module, root, call, error)
        if asked:
            lost = sorted(set(call.sizes) - set(kept.sizes))
            raise FixedSize(
                f"{type(module).__name__} fixes a size that the inputs name as a dynamic dim: {'; '.join(fixed)}. Give that size as a number, or change the "
                f"member's code{next(filter(None, map(way_out, fixed)), '')}",
                lost,
            ) from error
        call = kept
    prefix = MEMBER if isinstance(root, Traced) else ""
    _drop_first_changes(exported, make, call, entry, prefix)
    _refuse_changes(exported, module, call, entry, prefix, assigned - set(wanted.buffers))
    exported.graph.eliminate_dead_code()
    symbols = _symbols(exported, call)
    outputs, returned, news = _outputs(exported, symbols, len(wanted.buffers) + len(wanted.leaves))
    found = carried_by(exported, module, call.leaves, entry, wanted, states, outputs, news, prefix)
    weights, program = _read(exported, module, call, entry, prefix, found, symbols)
    guards = guards_of(exported, call.leaves, type(module).__name__, seen)
    dims = _ranges(exported, call, symbols, guards, lines_of(seen, call.leaves))
    carried = {s.output for s in found.states}
    return Captured(
        program,
        weights,
        (*call.leaves, *found.leaves),
        call.signature,
        found.outputs,
        without(returned, carried),
        dims,
        call.sizes,
        guards,
        fixed,
        returned,
        found.states,
        frozenset(found.unchanged),
        attributes,
    )


def _refuse_shared_memory(module: nn.Module, buffers: Sequence[str]) -> None:
    """Refuse a state whose memory the member reaches by another name too: what it writes under one name it would not see under the other. Raises: CaptureError."""
    held = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers(remove_duplicate=False)), **dict(tensors_of(module))}
    for name in buffers:
        own = held[name].untyped_storage()._cdata
        others = sorted(n for n, t in held.items() if n != name and t.untyped_storage()._cdata == own)
        if others:
            raise CaptureError(
                f"state {name} of {type(module).__name__} lies in the memory of {', '.join(others)} too; a state has one name: register a tensor of its own, for example with .clone()"
            )


def _drop_first_changes(exported: torch.export.ExportedProgram, make: Callable[[], nn.Module], call: Call, entry: str, prefix: str) -> None:
    """Leave out what a member writes into its parameters in its first call alone (weights that are scaled for inference, once): the program begins with the
    checkpoint's weights at every call, and so writes the same again. A member that goes on writing is refused.
    """
    specs = exported.graph_signature.output_specs
    written = {i: str(s.target).removeprefix(prefix) for i, s in enumerate(specs) if s.kind.name == "PARAMETER_MUTATION"}
    if not written:
        return
    inputs = {s.arg.name for s in exported.graph_signature.input_specs if s.kind is InputKind.USER_INPUT}
    (output,) = (n for n in exported.graph.nodes if n.op == "output")
    hanging = [name for i, name in written.items() if any(n.name in inputs for n in _before(output.args[0][i]))]
    if hanging:
        raise CaptureError(
            f"{type(make()).__name__} changes its parameters {', '.join(hanging[:5])} by what it is given when {entry} runs in eval mode; a member program has "
            "no side effects: make them buffers and build with --state, or change them in train mode alone"
        )
    module = make()
    held = dict(module.named_parameters(remove_duplicate=False))
    first: dict[str, torch.Tensor] = {}
    for scale in (1, 1, 0.5):  # other inputs too: what is written must hang on none
        args, kwargs = pytree.tree_map(
            lambda t, k=scale: (t * k if t.is_floating_point() else t.clone()) if isinstance(t, torch.Tensor) else t, (call.args, call.kwargs)
        )
        with calm(), torch.no_grad():
            method_of(module, entry)(*args, **kwargs)
        first = first or {n: held[n].detach().clone() for n in written.values()}
        moved = [n for n, value in first.items() if not torch.equal(held[n], value)]
        if moved:
            raise CaptureError(
                f"{type(module).__name__} changes its parameters {', '.join(moved[:5])} at every call of {entry} in eval mode; a member program has no side effects: "
                "make them buffers and build with --state, or change them in train mode alone"
            )
    specs[:] = [s for i, s in enumerate(specs) if i not in written]
    output.args = (tuple(a for i, a in enumerate(output.args[0]) if i not in written),)


def _refuse_changes(
    exported: torch.export.ExportedProgram, module: nn.Module, call: Call, entry: str, prefix: str, assigned: Collection[str]
) -> None:
    """Refuse a member that changes buffers or inputs that are no states, or anything else. Raises: CaptureError."""
    signature = exported.graph_signature
    known = (OutputKind.USER_OUTPUT, OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION)
    other = next((s for s in signature.output_specs if s.kind not in known), None)
    if other is not None:
        what = f"changes {str(other.target).removeprefix(prefix)}" if other.target else "has a side effect"
        raise CaptureError(
            f"{type(module).__name__} {what} when {entry} runs in eval mode ({other.kind.name.lower().replace('_', ' ')}); a member program has no side effects"
        )
    tensors = [s.arg.name for s in signature.input_specs if s.kind is InputKind.USER_INPUT and isinstance(s.arg, TensorArgument)]
    names = {name: leaf.name for name, leaf in zip(tensors, call.leaves)}
    buffers = {str(n).removeprefix(prefix) for n in signature.buffers_to_mutate.values()} | set(assigned)
    inputs = {names.get(str(n), str(n)) for n in signature.user_inputs_to_mutate.values()}
    changed = sorted(buffers | inputs)
    if changed:
        named = " ".join(f"--state {name}" for name in changed)
        raise CaptureError(
            f"{type(module).__name__} changes {', '.join(changed)} when {entry} runs in eval mode; a member program has no side effects. To carry "
            f"{'it' if len(changed) == 1 else 'them'} from call to call, build with {named}: an input and an output of the program then; or make {entry} return the new value instead{', or work on a copy of its input' if inputs else ''}"
        )


class FixedSize(CaptureError):
    """A member that fixes sizes which the inputs name as dynamic dims. letters: those dims."""

    def __init__(self, message: str, letters: Sequence[str]) -> None:
        super().__init__(message)
        self.letters = tuple(letters)


def _why(error: Exception, module: nn.Module, call: Call, entry: str, seen: Seen) -> str:
    """Why an export failed: the member does not take the example by itself, or torch cannot follow it. module: a fresh member."""
    own = why_not(Trial(module, entry, call.args, call.kwargs, call.leaves, call.sizes))
    return own or explain(error, module, {symbol: guard_forms.text(expr) for symbol, expr in names_of(seen, call.leaves).items()})


def _with_fixed(
    module: nn.Module, traced: nn.Module, call: Call, error: Exception
) -> tuple[torch.export.ExportedProgram, Call, tuple[str, ...], Seen]:
    """The export with those dims static that the member's code fixes; the call without their letters; a sentence for each, with the user's line."""
    try:
        with watched() as seen:
            exported = _export(traced, call, Dim.AUTO)
    except Exception as e:  # noqa: BLE001  # whatever torch raises is explained
        raise CaptureError(explain(e, module, {symbol: guard_forms.text(expr) for symbol, expr in names_of(seen, call.leaves).items()})) from error
    by_name = {n.name: n for n in exported.graph.nodes}
    tensors = [s.arg.name for s in exported.graph_signature.input_specs if s.kind is InputKind.USER_INPUT and isinstance(s.arg, TensorArgument)]
    lines = {place: line for key, line in seen.fixed.items() if isinstance(key, str) and (place := place_of(key, seen))}
    leaves, fixed = [], []
    gone: set[str] = set()
    for leaf, name in zip(call.leaves, tensors):
        shape = by_name[name].meta["val"].shape
        gone |= {factor_of(text)[1] for axis, text in leaf.axes.items() if known(shape[axis]) is not None}
    for leaf in call.leaves:
        here = {axis: text for axis, text in leaf.axes.items() if factor_of(text)[1] in gone}
        for axis, named in here.items():
            size = leaf.example.shape[axis]
            line = lines.get((leaf.name, axis)) or seen.fixed.get(size, "")
            fixed.append(f"{leaf.name} has {size} at axis {axis} ({named}){f', fixed by {line}' if line else ''}")
        kept = {axis: text for axis, text in leaf.axes.items() if axis not in here}
        leaves.append(replace(leaf, axes=kept, type=_leaf_type(leaf.example, kept, leaf.name, {})))
    sizes = {letter: size for letter, size in call.sizes.items() if letter not in gone}
    return exported, replace(call, leaves=tuple(leaves), sizes=sizes), tuple(fixed), seen


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
        return _functional(exported)


def _run_once(module: nn.Module, call: Call, entry: str) -> None:
    """Run a member that nobody keeps. What its code remembers for good (`functools.cache`) is made of numbers then: an export leaves tensors without any, of
    which the user's own module would answer from there on. An error is left to the export, which explains it."""
    clone = lambda t: t.clone() if isinstance(t, torch.Tensor) else t  # noqa: E731  # the member may write into its inputs
    args, kwargs = pytree.tree_map(clone, (call.args, call.kwargs))
    with calm(), torch.no_grad(), torch.random.fork_rng(devices=[]), suppress(Exception):
        method_of(module, entry)(*args, **kwargs)


def _functional(exported: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The functional form with linear, conv, norms and attention whole; an op that the format does not have is taken apart, where torch or taken_apart.py knows how."""
    apart: dict[Any, Any] = {torch.ops.aten.as_strided.default: by_places, **taken_apart.known_ways()}
    while True:
        functional: torch.export.ExportedProgram = exported.run_decompositions(apart)
        strange = {n.target for n in functional.graph.nodes if n.op == "call_function" and ops.name_of(n.target) not in OPS}
        known_ways = torch.export.default_decompositions() if strange - set(apart) else {}
        new = {op: known_ways[op] for op in strange - set(apart) if op in known_ways}
        if not new:
            return functional
        apart |= new


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


def _symbols(exported: torch.export.ExportedProgram, call: Call) -> dict[Any, str]:
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


def _read(
    exported: torch.export.ExportedProgram, module: nn.Module, call: Call, entry: str, prefix: str, found: Found, symbols: Mapping[Any, str]
) -> tuple[dict[str, tuple[str, torch.Tensor]], Program]:
    """The export as a member program: states are inputs and outputs, all else that the member holds is a weight."""
    signature = exported.graph_signature
    places = [i for i, spec in enumerate(signature.output_specs) if isinstance(spec.arg, TensorArgument)]
    kept = {places[i] for i in (*range(len(found.outputs) - len(found.kept)), *found.kept)}
    (output,) = (n for n in exported.graph.nodes if n.op == "output")
    output.args = (tuple(a if i in kept or i not in places else None for i, a in enumerate(output.args[0])),)
    _drop_asserts(exported.graph, module)
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


def _clean(name: str) -> str:
    return re.sub(r"\W", "_", name)


def constant_path(module: nn.Module, value: torch.Tensor) -> str:
    """Where a lifted tensor lives in the member's objects (`blocks.0.freqs`), by identity; empty for a literal in the code."""
    return next((path for path, found in tensors_of(module) if same_memory(found, value)), "")


def state_name(tensors: Mapping[str, torch.Tensor], value: torch.Tensor) -> str:
    """The parameter or buffer that a lifted tensor is; empty where it is none."""
    return next((name for name, found in tensors.items() if same_memory(found, value)), "")


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are one: export detaches what it lifts."""
    if a is b:
        return True
    alike = a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride() and a.device == b.device
    return alike and a.numel() > 0 and a.data_ptr() == b.data_ptr()


def _drop_asserts(graph: fx.Graph, module: nn.Module) -> None:
    """Take out what only looks whether a value is as expected, and with it a number that is read from a tensor for that alone.

    A truth value of which torch itself says no more than that it is 0 or 1 was read for something else: a branch whose error the member's code caught.
    Raises: CaptureError.
    """
    for node in graph.nodes:
        if getattr(node.target, "_opname", "") in _READS:
            checks = [n for n in _after(node) if getattr(n.target, "_opname", "") in _ASSERTS]
            if checks and all(_OWN_CHECK.search(str(n.args[-1])) for n in checks):
                raise CaptureError(
                    no_form("aten._local_scalar_dense.default", node.name, module, user_line(node.meta.get("stack_trace") or "", code=True))
                )
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and getattr(node.target, "_opname", "") in _ASSERTS and not node.users:
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _before(node: fx.Node) -> set[fx.Node]:
    """Whatever a node hangs on."""
    found: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        new = set(waiting.pop().all_input_nodes) - found
        found |= new
        waiting += new
    return found


def _after(node: fx.Node) -> set[fx.Node]:
    """Whatever hangs on a node."""
    found: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        new = set(waiting.pop().users) - found
        found |= new
        waiting += new
    return found


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


def _node(n: fx.Node, renamed: Mapping[str, str], symbols: Mapping[Any, str], module: nn.Module) -> Node:
    name = ops.name_of(n.target)
    name = _PLAIN.get(name, name)
    source = source_of(n)
    if name not in OPS:
        raise CaptureError(no_form(name, n.name, module, user_line(n.meta.get("stack_trace") or "", code=True)))

    def ref(value: fx.Node) -> Any:
        return Ref(renamed.get(value.name, _clean(value.name)))

    if name == "aten.squeeze.default":  # the rank is the captured one: a batch of 1 is no dim to drop
        value: Any = n.args[0]
        ones = [d for d, size in enumerate(value.meta["val"].shape) if known(size) == 1]
        return Node(_clean(n.name), "aten.squeeze.dims", (ref(value), ones), {}, type_of(n.meta.get("val"), symbols), source)

    args = encode(fx.node.map_arg(n.args, ref))
    kwargs = {k: encode(fx.node.map_arg(v, ref)) for k, v in n.kwargs.items() if k not in ("pin_memory", "layout") and v is not None}
    return Node(_clean(n.name), name, tuple(args), kwargs, type_of(n.meta.get("val"), symbols), source)


def _outputs(exported: torch.export.ExportedProgram, symbols: Mapping[Any, str], news: int) -> tuple[tuple[tuple[str, str], ...], Tree, list[New]]:
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
    if type(value) is dict:
        return {"dict": [[k, _result(v, k)] for k, v in value.items()]}
    if isinstance(value, Mapping):
        return {"output": [type(value).__name__, [[k, _result(v, k)] for k, v in value.items()]]}
    if hasattr(value, "__dataclass_fields__"):
        return {"output": [type(value).__name__, [[k, _result(getattr(value, k), k)] for k in value.__dataclass_fields__]]}
    raise CaptureError(f"the output is a {type(value).__name__}; outputs are tensors, numbers, strings and None, in tuples, lists and dicts")


def _ranges(
    exported: torch.export.ExportedProgram, call: Call, symbols: Mapping[Any, str], guards: Sequence[GuardSource], lines: Sequence[GuardSource]
) -> dict[str, tuple[int, int | None, str]]:
    """Each letter's bounds as far as export knows them, with the lines that they come from. lines: conditions as they came up.

    A lower bound of 2, or one out of conditions on small sizes, may be export's own, not the member's.
    """
    asked = {letter for g in guards if of_small_sizes(g.expr) for letter in letters(g.expr)}
    bounds: dict[str, tuple[int, int | None]] = dict.fromkeys(call.sizes, (1, None))
    for symbol, range_ in exported.range_constraints.items():
        letter = symbols.get(symbol, "")
        if letter in bounds:
            least, most = bounds[letter]
            low = int(range_.lower) if range_.lower.is_Integer and int(range_.lower) > 2 and letter not in asked else 1
            high = int(range_.upper) if range_.upper.is_Integer else None
            bounds[letter] = max(least, low), high if most is None else most if high is None else min(most, high)
    found = [*guards, *lines]
    ends = {
        letter: ((least, least - 1) if least > 1 else None, (most, most + 1) if most is not None else None)
        for letter, (least, most) in bounds.items()
    }
    sources = {letter: dict.fromkeys(bound_line(letter, *end, found) for end in both if end) for letter, both in ends.items()}
    return {letter: (*both, " and ".join(filter(None, sources[letter]))) for letter, both in bounds.items()}
