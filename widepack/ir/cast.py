"""Changes the floating dtypes of a member program by a table of dtypes, for a load and for float64 answers.

New dtypes for weights and inputs are not enough. A program contains dtypes (`zeros(dtype=float32)`, a norm in
float32), and ops that make floats of other numbers: `arange` without a dtype, the quotient of two integers.
Those take torch's default dtype, which belongs to the whole process and is never changed here. Instead the op
gets a dtype argument, or its arguments are cast before it.

A program in float64 gives the reference answers that a wide program is compared with. Every floating dtype in
it becomes float64, every complex one complex128. A default that an op takes from the dtype (the largest
number of `nan_to_num`, the eps of a norm) is part of the computation: the member's dtype decides it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from widepack_artifacts.program import Node, Program, Ref, Tag, refs

from ..errors import LoweringError
from ..spec.dtypes import dtype_name, dtype_of
from . import ops
from .edit import free_name, renamed, types_of, with_nodes
from .encoding import map_arguments
from .tensor_type import dtype_in, has_floats, tensor_type, with_dtypes

_CAST = "aten._to_copy.default"
_CHOICES = ("aten.where.",)  # a bool argument of these is a condition, not a number
_UP = {
    **dict.fromkeys(("float16", "bfloat16", "float32"), "float64"),
    **dict.fromkeys(("complex32", "complex64"), "complex128"),
}
_DOWN = {"float64": "float32", "complex128": "complex64"}


def raised(program: Program, late: bool = False) -> Program:
    """A member program in float64, also where it makes floats of integers.

    torch's default dtype has no effect on it. late: it takes its weights as they are, and raises each before
    it is first read, so that no more than one layer's are in memory twice.
    """
    found = _with_dtype_arguments(raise_program(program), _UP)
    return _with_late_casts(found, program) if late else found


def raise_program(program: Program) -> Program:
    """The program with every floating dtype in it raised. `raised` also raises what takes none."""
    return _recast(_with_dtype_defaults(program), _UP)


def single_program(program: Program) -> Program:
    """The program of a float64 member in float32.

    Its error shows what rounding costs, as nothing is more exact than float64.
    """
    return _recast(_with_dtype_defaults(program), _DOWN)


def raise_value(value: Any) -> Any:
    """The tensors of a value in float64, complex ones in complex128.

    Tensors of other numbers stay as they are.
    """
    return _converted(value, torch.float64, torch.complex128)


def single_value(value: Any) -> Any:
    """The tensors of a value in float32, complex ones in complex64.

    Tensors of other numbers stay as they are.
    """
    return _converted(value, torch.float32, torch.complex64)


def _converted(value: Any, real: torch.dtype, of_complex: torch.dtype) -> Any:
    def converted(v: Any) -> Any:
        if not isinstance(v, torch.Tensor):
            return v
        return v.to(real) if v.is_floating_point() else v.to(of_complex) if v.is_complex() else v

    return map_arguments(value, converted)


def _cast_node(name: str, value: str, dtype: str, out: str = "", source: str = "") -> Node:
    """A node that casts a value."""
    return Node(name, _CAST, (Ref(value),), {"dtype": Tag("dtype", dtype)}, out, source)


def _with_literals(node: Node, fn: Callable[[Any], Any]) -> Node:
    """The node with `fn` applied to each of its arguments, also inside lists."""
    return replace(node, args=map_arguments(node.args, fn), kwargs=map_arguments(node.kwargs, fn))


def _recast(program: Program, table: Mapping[str, str]) -> Program:
    """The program with the dtypes in its arguments replaced by those of the table."""

    def up(value: Any) -> Any:
        if isinstance(value, Tag) and value.kind == "dtype":
            return Tag("dtype", table.get(value.name, value.name))
        return value

    return replace(program, nodes=tuple(_with_literals(n, up) for n in program.nodes))


def _with_late_casts(program: Program, original: Program) -> Program:
    """The program with a cast before each weight is first read.

    original: the program with the types that its weights have.
    """
    up = {s.name: _UP.get(dtype_in(s.type), "") for s in original.weights if s.kind != "ragged"}
    to: dict[str, Ref] = {}
    nodes: list[Node] = []

    def read(value: Any) -> None:
        for name in dict.fromkeys(refs(value)):
            if up.get(name) and name not in to:
                to[name] = Ref(f"{name}__raised")
                nodes.append(_cast_node(to[name].name, name, up[name]))

    for node in program.nodes:
        read((node.args, node.kwargs))
        nodes.append(renamed(node, to))
    for output in program.outputs:
        read(output.value)
    return with_nodes(program, nodes, to)


def _norm_eps(dtype: torch.dtype) -> dict[str, Any]:
    """The default eps of a norm: half precision is computed in float32."""
    return {"eps": torch.finfo(torch.promote_types(dtype, torch.float32)).eps}


_BY_DTYPE: dict[str, Callable[[torch.dtype], dict[str, Any]]] = {
    "aten.nan_to_num.default": lambda d: {"posinf": torch.finfo(d).max, "neginf": torch.finfo(d).min},
    "aten.rms_norm.default": _norm_eps,
}
"""The defaults that ops take from the dtype of their first argument."""


def _with_dtype_defaults(program: Program) -> Program:
    """The program with explicit arguments for the defaults that ops take from the member's dtype."""
    types = types_of(program)
    return replace(program, nodes=tuple(_with_defaults(n, types) for n in program.nodes))


def _with_defaults(node: Node, types: Mapping[str, str]) -> Node:
    if node.op not in _BY_DTYPE or not node.args or not isinstance(node.args[0], Ref):
        return node
    type_ = tensor_type(types.get(node.args[0].name, ""))
    if type_ is None or not type_.is_rounded:
        return node
    given = ops.bind(node.op, node.args, node.kwargs)
    defaults = {a: v for a, v in _BY_DTYPE[node.op](dtype_of(type_.dtype)).items() if given.get(a) is None}
    order = [a for a, _, _ in ops.arguments(node.op)]
    later = {a: v for a, v in defaults.items() if a not in order[: len(node.args)]}
    args = tuple(defaults.get(a, v) for a, v in zip(order, node.args))
    return replace(node, args=args, kwargs={**node.kwargs, **later})


def _with_dtype_arguments(program: Program, table: Mapping[str, str]) -> Program:
    """The program with the types of the table, and an explicit dtype at each node that makes floats of other
    numbers.

    Literals stay.
    """
    types = types_of(program)
    taken = set(types)
    nodes: list[Node] = []
    for node in program.nodes:
        dtype, default_type = table.get(dtype_in(node.out), ""), node.out
        node = replace(node, out=with_dtypes(node.out, table))
        reads = {r: types.get(r, "") for r in refs((node.args, node.kwargs))}
        if not dtype or any(map(has_floats, reads.values())):
            nodes.append(node)
        else:
            nodes += _with_dtype(node, dtype, default_type, reads, taken)
    weights = tuple(replace(s, type=with_dtypes(s.type, table)) for s in program.weights)
    inputs = tuple(replace(s, type=with_dtypes(s.type, table)) for s in program.inputs)
    return replace(program, weights=weights, inputs=inputs, nodes=tuple(nodes))


def _with_dtype(
    node: Node, dtype: str, default_type: str, types: Mapping[str, str], taken: set[str]
) -> list[Node]:
    """The nodes for one that reads no floats and returns some.

    default_type: its type without a dtype argument. types: of its arguments.
    """
    order = [a for a, _, _ in ops.arguments(node.op)]
    if "dtype" in order:
        if ops.bind(node.op, node.args, node.kwargs).get("dtype") is not None:
            return [node]
        at, tag = order.index("dtype"), Tag("dtype", dtype)
        if at < len(node.args):
            return [replace(node, args=(*node.args[:at], tag, *node.args[at + 1 :]))]
        return [replace(node, kwargs={**node.kwargs, "dtype": tag})]
    casts: list[Node] = []
    to: dict[str, Ref] = {}
    for name, text in types.items():
        type_ = tensor_type(text)
        if type_ is None or (type_.dtype == "bool" and node.op.startswith(_CHOICES)):
            continue
        to[name] = Ref(free_name(f"{name}_as_{dtype}", taken))
        casts.append(_cast_node(to[name].name, name, dtype, str(type_.with_dtype(dtype)), node.source))
    if not casts:  # only numbers: `where(mask, 1.0, 0.0)`
        new = free_name(f"{node.name}_as_it_comes", taken)
        cast = _cast_node(node.name, new, dtype, node.out, node.source)
        return [replace(node, name=new, out=default_type), cast]
    return [*casts, renamed(node, to)]


def cast_program(program: Program, table: Mapping[str, str], sizes: Mapping[str, int]) -> Program:
    """A member program in the dtypes of the table.

    A literal that is the largest number of a dtype becomes that of the new dtype.

    sizes: example sizes, at which each node's dtype is computed. A node of another dtype than expected is
    cast to that. Raises: LoweringError naming a node that does not run in the new dtype.
    """
    largest = {
        float(torch.finfo(dtype_of(old)).max): float(torch.finfo(dtype_of(new)).max)
        for old, new in table.items()
    }

    def literal(value: Any) -> Any:
        if isinstance(value, float) and abs(value) in largest:
            return math.copysign(largest[abs(value)], value)
        return value

    typed = _with_dtype_arguments(_recast(program, table), table)
    typed = replace(typed, nodes=tuple(_with_literals(n, literal) for n in typed.nodes))
    return _with_declared_dtypes(typed, table, sizes)


def _with_declared_dtypes(program: Program, table: Mapping[str, str], sizes: Mapping[str, int]) -> Program:
    """The program with a cast after each node whose tensor does not have the dtype of its type."""
    from .fake_values import Shapes

    shapes = Shapes(sizes)
    taken = set(types_of(program))
    shapes.of(replace(program, nodes=(), outputs=()))
    nodes: list[Node] = []
    for number, node in enumerate(program.nodes):
        try:
            shapes.add(node)
        except LoweringError:  # only values determine its size: the nodes after it have no fake values
            return replace(program, nodes=(*nodes, *program.nodes[number:]))
        except (RuntimeError, IndexError, TypeError, ValueError) as e:
            raise LoweringError(
                f"node {node.name} ({node.op}{f', from {node.source}' if node.source else ''}) does not run "
                f"in {', '.join(dict.fromkeys(table.values()))}: "
                f"{' '.join(str(e).split())[:300]}; load without dtype"
            ) from e
        value, wanted = shapes.values[node.name], dtype_in(node.out)
        if isinstance(value, torch.Tensor) and wanted in table.values() and value.dtype != dtype_of(wanted):
            new = free_name(f"{node.name}_as_it_comes", taken)
            shapes.values[new] = shapes.values.pop(node.name)
            comes_as = with_dtypes(node.out, {wanted: dtype_name(value.dtype)})
            nodes.append(replace(node, name=new, out=comes_as))
            node = _cast_node(node.name, new, wanted, node.out, node.source)
            shapes.add(node)
        nodes.append(node)
    return replace(program, nodes=tuple(nodes))
