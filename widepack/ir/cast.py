"""A member program in other dtypes: every floating dtype of it that a table names becomes another.

Weights and inputs of that dtype are not enough. A program holds dtypes of its own (`zeros(dtype=float32)`), and makes floats of what is none: `arange` where nothing
is said, the quotient of two integers. Those take torch's default dtype, which belongs to the whole process and is never touched here: the dtype is said, or what the op
reads is brought into it before.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from widepack_artifacts.program import Node, Program, Ref, Tag, refs

from . import ops
from .encoding import dtype_name, dtype_of
from ..errors import LoweringError
from .float64 import UP, raise_program, recast

_FLOATING = re.compile(r"\b(?:float16|bfloat16|float32|float64|complex32|complex64|complex128)\b(?=\[)")
_CAST = "aten._to_copy.default"
_CHOICES = ("aten.where.",)  # a bool there says which, and is no number


def retyped(text: str, table: Mapping[str, str]) -> str:
    """A type text, `float32[B,3]` or one of several values, in the dtypes of the table."""
    return _FLOATING.sub(lambda m: table.get(m[0], m[0]), text)


def raised(program: Program) -> Program:
    """A member program in float64 that makes float64 of integers too, whatever torch's default dtype is."""
    return told(raise_program(program), UP)


def told(program: Program, table: Mapping[str, str]) -> Program:
    """The program with its types in the dtypes of the table, and every node that makes floats of what is none told which. Its literals are as they were."""
    types = {s.name: s.type for s in (*program.weights, *program.inputs)} | {n.name: n.out for n in program.nodes}
    taken = set(types)
    nodes: list[Node] = []
    for node in program.nodes:
        dtype, comes = table.get(node.out.partition("[")[0], ""), node.out
        node = replace(node, out=retyped(node.out, table))
        reads = list(dict.fromkeys(refs((node.args, node.kwargs))))
        if not dtype or any(_FLOATING.search(types.get(r, "")) for r in reads):
            nodes.append(node)
            continue
        nodes += _said(node, dtype, comes, {r: types.get(r, "") for r in reads}, taken)
    weights = tuple(replace(s, type=retyped(s.type, table)) for s in program.weights)
    inputs = tuple(replace(s, type=retyped(s.type, table)) for s in program.inputs)
    return replace(program, weights=weights, inputs=inputs, nodes=tuple(nodes))


def _said(node: Node, dtype: str, comes: str, types: Mapping[str, str], taken: set[str]) -> list[Node]:
    """A node that reads no floats and gives some. comes: its type where nothing is said. types: of what it reads."""
    order = [a for a, _, _ in ops.arguments(node.op)]
    if "dtype" in order:
        if ops.bind(node.op, node.args, node.kwargs).get("dtype") is not None:
            return [node]
        at, tag = order.index("dtype"), Tag("dtype", dtype)
        if at < len(node.args):
            return [replace(node, args=(*node.args[:at], tag, *node.args[at + 1 :]))]
        return [replace(node, kwargs={**node.kwargs, "dtype": tag})]
    made: list[Node] = []
    to: dict[str, Ref] = {}
    for name, type_ in types.items():
        if "[" not in type_ or type_.startswith("(") or (type_.startswith("bool") and node.op.startswith(_CHOICES)):
            continue
        new = f"{name}_as_{dtype}"
        while new in taken:
            new += "_"
        taken.add(new)
        to[name] = Ref(new)
        made.append(Node(new, _CAST, (Ref(name),), {"dtype": Tag("dtype", dtype)}, f"{dtype}{type_[type_.index('[') :]}", node.source))

    if not made:  # of numbers alone: `where(mask, 1.0, 0.0)`
        new = f"{node.name}_as_it_comes"
        while new in taken:
            new += "_"
        taken.add(new)
        return [replace(node, name=new, out=comes), Node(node.name, _CAST, (Ref(new),), {"dtype": Tag("dtype", dtype)}, node.out, node.source)]

    def cast(value: Any) -> Any:
        if isinstance(value, Ref):
            return to.get(value.name, value)
        return type(value)(cast(v) for v in value) if isinstance(value, (list, tuple)) else value

    return [*made, replace(node, args=cast(node.args), kwargs={k: cast(v) for k, v in node.kwargs.items()})]


def cast_program(program: Program, table: Mapping[str, str], sizes: Mapping[str, int]) -> Program:
    """A member program in the dtypes of the table, literals that are the largest number of one of them included.

    sizes: of an example, at which every node is asked what it gives: one that gives another dtype than the member's own would have had is brought into it.
    Raises: LoweringError naming a node that does not run in the new dtype.
    """
    largest = {float(torch.finfo(dtype_of(old)).max): float(torch.finfo(dtype_of(new)).max) for old, new in table.items()}

    def literal(value: Any) -> Any:
        if isinstance(value, float) and not isinstance(value, bool) and abs(value) in largest:
            return math.copysign(largest[abs(value)], value)
        return type(value)(literal(v) for v in value) if isinstance(value, (list, tuple)) else value

    made = told(recast(program, table), table)
    made = replace(made, nodes=tuple(replace(n, args=literal(n.args), kwargs={k: literal(v) for k, v in n.kwargs.items()}) for n in made.nodes))
    return _steady(made, table, sizes)


def _steady(program: Program, table: Mapping[str, str], sizes: Mapping[str, int]) -> Program:
    """The program with every single tensor in the dtype that its type says."""
    from .fake_values import Shapes

    shapes = Shapes(sizes)
    taken = {s.name for s in (*program.weights, *program.inputs)} | {n.name for n in program.nodes}
    shapes.of(replace(program, nodes=(), outputs=()))
    nodes: list[Node] = []
    for number, node in enumerate(program.nodes):
        try:
            shapes.add(node)
        except LoweringError:  # its size is data: what follows cannot be asked without any
            return replace(program, nodes=(*nodes, *program.nodes[number:]))
        except (RuntimeError, IndexError, TypeError, ValueError) as e:
            raise LoweringError(
                f"node {node.name} ({node.op}{f', from {node.source}' if node.source else ''}) does not run in {', '.join(dict.fromkeys(table.values()))}: "
                f"{' '.join(str(e).split())[:300]}; load without dtype"
            ) from e
        value, wanted = shapes.values[node.name], node.out.partition("[")[0]
        if isinstance(value, torch.Tensor) and wanted in table.values() and value.dtype != dtype_of(wanted):
            new = f"{node.name}_as_it_comes"
            while new in taken:
                new += "_"
            taken.add(new)
            shapes.values[new] = shapes.values.pop(node.name)
            nodes.append(replace(node, name=new, out=dtype_name(value.dtype) + node.out[len(wanted) :]))
            node = Node(node.name, _CAST, (Ref(new),), {"dtype": Tag("dtype", wanted)}, node.out, node.source)
            shapes.add(node)
        nodes.append(node)
    return replace(program, nodes=tuple(nodes))
