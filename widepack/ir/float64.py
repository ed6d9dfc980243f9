"""A member program raised to float64: the truth that a wide program is compared with.

Weights and inputs in float64 are not enough: a program holds dtypes of its own (`zeros(dtype=float32)`, a norm's float32 island). Every floating dtype in it
becomes float64, every complex one complex128. What an op takes from the dtype where nothing is said (the largest number of `nan_to_num`, the eps of a norm) is
part of what it computes: it is filled in from the member's own dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from widepack_artifacts.program import Node, Program, Ref, Tag, refs, substitute

from . import ops
from .encoding import dtype_of
from ..registry.registry import full_name

UP = {"float16": "float64", "bfloat16": "float64", "float32": "float64", "complex32": "complex128", "complex64": "complex128"}


_DOWN = {"float64": "float32", "complex128": "complex64"}


def raise_program(program: Program, late: bool = False) -> Program:
    """The program with every floating dtype in it raised. late: it takes its weights as they are and raises each before it is first read, so that no more than
    one layer's are in memory twice."""
    raised = recast(_with_own(program), UP)
    return _late(raised, program) if late else raised


def _late(program: Program, own: Program) -> Program:
    """own: the program with the types that its weights have."""
    up = {s.name: UP.get(s.type.partition("[")[0], "") for s in own.weights if s.kind != "ragged"}
    to: dict[str, Ref] = {}
    nodes: list[Node] = []

    def read(value: Any) -> None:
        for name in dict.fromkeys(refs(value)):
            if up.get(name) and name not in to:
                to[name] = Ref(f"{name}__raised")
                nodes.append(Node(to[name].name, "aten._to_copy.default", (Ref(name),), {"dtype": Tag("dtype", up[name])}))

    def put(name: str) -> Ref:
        return to.get(name, Ref(name))

    for node in program.nodes:
        read((node.args, node.kwargs))
        nodes.append(replace(node, args=substitute(node.args, put), kwargs=substitute(node.kwargs, put)))
    for output in program.outputs:
        read(output.value)
    return replace(program, nodes=tuple(nodes), outputs=tuple(replace(o, value=substitute(o.value, put)) for o in program.outputs))


def single_program(program: Program) -> Program:
    """The program of a member in float64, in float32: what its rounding costs can be seen there, since float64 has no truth above it."""
    return recast(_with_own(program), _DOWN)


def single_value(value: Any) -> Any:
    """A tensor in float32 or complex64 if it holds such numbers; lists item by item."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.is_floating_point() else value.to(torch.complex64) if value.is_complex() else value
    return [single_value(v) for v in value] if isinstance(value, list) else value


def recast(program: Program, table: Mapping[str, str]) -> Program:
    """The program with the dtypes that its arguments name as the table has them."""

    def up(value: Any) -> Any:
        if isinstance(value, Tag):
            return Tag("dtype", table.get(value.name, value.name)) if value.kind == "dtype" else value
        if isinstance(value, (list, tuple)):
            return type(value)(up(v) for v in value)
        return value

    return replace(program, nodes=tuple(replace(n, args=up(n.args), kwargs={k: up(v) for k, v in n.kwargs.items()}) for n in program.nodes))


def _with_own(program: Program) -> Program:
    """The program with what ops take from the dtype said, as it is in the member's own dtype."""
    types = {s.name: s.type for s in (*program.weights, *program.inputs)} | {n.name: n.out for n in program.nodes}
    return replace(program, nodes=tuple(_told(n, types) for n in program.nodes))


def _largest(dtype: torch.dtype) -> dict[str, Any]:
    return {"posinf": torch.finfo(dtype).max, "neginf": torch.finfo(dtype).min}


def _norm_eps(dtype: torch.dtype) -> dict[str, Any]:
    """Half precision is computed in float32, and so is its eps."""
    return {"eps": torch.finfo(torch.promote_types(dtype, torch.float32)).eps}


_BY_DTYPE = {
    full_name("nan_to_num"): _largest,
    full_name("rms_norm"): _norm_eps,
}


def _told(node: Node, types: Mapping[str, str]) -> Node:
    """The node with what its op takes from the dtype said: arguments that are None, or not given."""
    first = node.args[0] if node.args else None
    type_ = types.get(first.name, "") if node.op in _BY_DTYPE and isinstance(first, Ref) else ""
    if not type_.startswith(("float", "bfloat", "complex")):
        return node
    given = ops.bind(node.op, node.args, node.kwargs)
    told = {a: v for a, v in _BY_DTYPE[node.op](dtype_of(type_.partition("[")[0])).items() if given.get(a) is None}
    order = [a for a, _, _ in ops.arguments(node.op)]
    return replace(
        node,
        args=tuple(told.get(a, v) for a, v in zip(order, node.args)),
        kwargs={**node.kwargs, **{a: v for a, v in told.items() if a not in order[: len(node.args)]}},
    )


def raise_value(value: Any) -> Any:
    """A tensor in float64 or complex128 if it holds such numbers; lists item by item."""
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value.to(torch.complex128) if value.is_complex() else value
    return [raise_value(v) for v in value] if isinstance(value, list) else value


@contextmanager
def double_by_default() -> Iterator[None]:
    """Where an op makes floats of integers it takes the default dtype: float64 here."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
