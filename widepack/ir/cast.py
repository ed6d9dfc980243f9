"""Changes the floating dtypes of a member program by a table of dtypes.

New dtypes for weights and inputs are not enough. A program contains dtypes (`zeros(dtype=float32)`), and ops
that make floats of other numbers: `arange` without a dtype, the quotient of two integers. Those take torch's
default dtype, which belongs to the whole process and is never changed here. Instead the op gets a dtype
argument, or its arguments are cast before it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from widepack_artifacts.program import Node, Program, Ref, Tag, refs

from ..errors import LoweringError
from ..spec.dtypes import dtype_name, dtype_of
from . import ops
from .encoding import map_arguments
from .float64 import UP, raise_program, recast, with_late_casts
from .tensor_type import dtype_in, has_floats, tensor_type, with_dtypes

_CAST = "aten._to_copy.default"
_CHOICES = ("aten.where.",)  # a bool argument of these is a condition, not a number


def raised(program: Program, late: bool = False) -> Program:
    """A member program in float64, also where it makes floats of integers.

    torch's default dtype has no effect on it. late: it takes its weights as they are, and raises each before
    it is first read, so that no more than one layer's are in memory twice.
    """
    found = with_dtype_arguments(raise_program(program), UP)
    return with_late_casts(found, program) if late else found


def with_dtype_arguments(program: Program, table: Mapping[str, str]) -> Program:
    """The program with the types of the table, and an explicit dtype at each node that makes floats of other
    numbers.

    Literals stay.
    """
    types = {s.name: s.type for s in (*program.weights, *program.inputs)} | {
        n.name: n.out for n in program.nodes
    }
    taken = set(types)
    nodes: list[Node] = []
    for node in program.nodes:
        dtype, default_type = table.get(dtype_in(node.out), ""), node.out
        node = replace(node, out=with_dtypes(node.out, table))
        reads = list(dict.fromkeys(refs((node.args, node.kwargs))))
        if not dtype or any(has_floats(types.get(r, "")) for r in reads):
            nodes.append(node)
            continue
        nodes += _with_dtype(node, dtype, default_type, {r: types.get(r, "") for r in reads}, taken)
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
        new = f"{name}_as_{dtype}"
        while new in taken:
            new += "_"
        taken.add(new)
        to[name] = Ref(new)
        casts.append(
            Node(
                new,
                _CAST,
                (Ref(name),),
                {"dtype": Tag("dtype", dtype)},
                str(type_.with_dtype(dtype)),
                node.source,
            )
        )

    if not casts:  # only numbers: `where(mask, 1.0, 0.0)`
        new = f"{node.name}_as_it_comes"
        while new in taken:
            new += "_"
        taken.add(new)
        return [
            replace(node, name=new, out=default_type),
            Node(node.name, _CAST, (Ref(new),), {"dtype": Tag("dtype", dtype)}, node.out, node.source),
        ]

    def cast(value: Any) -> Any:
        return to.get(value.name, value) if isinstance(value, Ref) else value

    return [
        *casts,
        replace(node, args=map_arguments(node.args, cast), kwargs=map_arguments(node.kwargs, cast)),
    ]


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
        if isinstance(value, float) and not isinstance(value, bool) and abs(value) in largest:
            return math.copysign(largest[abs(value)], value)
        return value

    typed = with_dtype_arguments(recast(program, table), table)
    typed = replace(
        typed,
        nodes=tuple(
            replace(n, args=map_arguments(n.args, literal), kwargs=map_arguments(n.kwargs, literal))
            for n in typed.nodes
        ),
    )
    return _with_declared_dtypes(typed, table, sizes)


def _with_declared_dtypes(program: Program, table: Mapping[str, str], sizes: Mapping[str, int]) -> Program:
    """The program with a cast after each node whose tensor does not have the dtype of its type."""
    from .fake_values import Shapes

    shapes = Shapes(sizes)
    taken = {s.name for s in (*program.weights, *program.inputs)} | {n.name for n in program.nodes}
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
            new = f"{node.name}_as_it_comes"
            while new in taken:
                new += "_"
            taken.add(new)
            shapes.values[new] = shapes.values.pop(node.name)
            nodes.append(
                replace(node, name=new, out=with_dtypes(node.out, {wanted: dtype_name(value.dtype)}))
            )
            node = Node(node.name, _CAST, (Ref(new),), {"dtype": Tag("dtype", wanted)}, node.out, node.source)
            shapes.add(node)
        nodes.append(node)
    return replace(program, nodes=tuple(nodes))
