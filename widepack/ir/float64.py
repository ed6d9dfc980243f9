"""Raises a member program to float64, for the reference answers that a wide program is compared with.

Weights and inputs in float64 are not enough: a program contains dtypes (`zeros(dtype=float32)`, a norm in
float32). Every floating dtype in it becomes float64, every complex one complex128. A default that an op takes
from the dtype (the largest number of `nan_to_num`, the eps of a norm) is part of the computation: it is
filled in from the member's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from widepack_artifacts.program import Node, Program, Ref, Tag, refs, substitute

from ..spec.dtypes import dtype_of
from . import ops
from .encoding import map_arguments
from .ops import full_name
from .tensor_type import dtype_in, tensor_type

UP = {
    "float16": "float64",
    "bfloat16": "float64",
    "float32": "float64",
    "complex32": "complex128",
    "complex64": "complex128",
}


_DOWN = {"float64": "float32", "complex128": "complex64"}


def raise_program(program: Program) -> Program:
    """The program with every floating dtype in it raised. `cast.raised` also raises what takes none."""
    return recast(_with_dtype_defaults(program), UP)


def with_late_casts(program: Program, original: Program) -> Program:
    """The program with a cast before each weight is first read.

    original: the program with the types that its weights have.
    """
    up = {s.name: UP.get(dtype_in(s.type), "") for s in original.weights if s.kind != "ragged"}
    to: dict[str, Ref] = {}
    nodes: list[Node] = []

    def read(value: Any) -> None:
        for name in dict.fromkeys(refs(value)):
            if up.get(name) and name not in to:
                to[name] = Ref(f"{name}__raised")
                nodes.append(
                    Node(
                        to[name].name,
                        "aten._to_copy.default",
                        (Ref(name),),
                        {"dtype": Tag("dtype", up[name])},
                    )
                )

    def put(name: str) -> Ref:
        return to.get(name, Ref(name))

    for node in program.nodes:
        read((node.args, node.kwargs))
        nodes.append(replace(node, args=substitute(node.args, put), kwargs=substitute(node.kwargs, put)))
    for output in program.outputs:
        read(output.value)
    return replace(
        program,
        nodes=tuple(nodes),
        outputs=tuple(replace(o, value=substitute(o.value, put)) for o in program.outputs),
    )


def single_program(program: Program) -> Program:
    """The program of a float64 member in float32.

    Its error shows what rounding costs, as nothing is more exact than float64.
    """
    return recast(_with_dtype_defaults(program), _DOWN)


def single_value(value: Any) -> Any:
    """The tensors of a value in float32, complex ones in complex64.

    Tensors of other numbers stay as they are.
    """
    return map_arguments(value, _single_tensor)


def _single_tensor(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_floating_point():
        return value.float()
    return value.to(torch.complex64) if value.is_complex() else value


def recast(program: Program, table: Mapping[str, str]) -> Program:
    """The program with the dtypes in its arguments replaced by those of the table."""

    def up(value: Any) -> Any:
        if isinstance(value, Tag) and value.kind == "dtype":
            return Tag("dtype", table.get(value.name, value.name))
        return value

    return replace(
        program,
        nodes=tuple(
            replace(n, args=map_arguments(n.args, up), kwargs=map_arguments(n.kwargs, up))
            for n in program.nodes
        ),
    )


def _with_dtype_defaults(program: Program) -> Program:
    """The program with explicit arguments for the defaults that ops take from the member's dtype."""
    types = {s.name: s.type for s in (*program.weights, *program.inputs)} | {
        n.name: n.out for n in program.nodes
    }
    return replace(program, nodes=tuple(_with_defaults(n, types) for n in program.nodes))


def _largest(dtype: torch.dtype) -> dict[str, Any]:
    return {"posinf": torch.finfo(dtype).max, "neginf": torch.finfo(dtype).min}


def _norm_eps(dtype: torch.dtype) -> dict[str, Any]:
    """The default eps of a norm: half precision is computed in float32."""
    return {"eps": torch.finfo(torch.promote_types(dtype, torch.float32)).eps}


_BY_DTYPE = {
    full_name("nan_to_num"): _largest,
    full_name("rms_norm"): _norm_eps,
}


def _with_defaults(node: Node, types: Mapping[str, str]) -> Node:
    """The node with explicit arguments for the defaults that its op takes from the dtype."""
    first = node.args[0] if node.args else None
    type_ = (
        tensor_type(types.get(first.name, "")) if node.op in _BY_DTYPE and isinstance(first, Ref) else None
    )
    if type_ is None or not type_.is_rounded:
        return node
    given = ops.bind(node.op, node.args, node.kwargs)
    defaults = {a: v for a, v in _BY_DTYPE[node.op](dtype_of(type_.dtype)).items() if given.get(a) is None}
    order = [a for a, _, _ in ops.arguments(node.op)]
    return replace(
        node,
        args=tuple(defaults.get(a, v) for a, v in zip(order, node.args)),
        kwargs={**node.kwargs, **{a: v for a, v in defaults.items() if a not in order[: len(node.args)]}},
    )


def raise_value(value: Any) -> Any:
    """The tensors of a value in float64, complex ones in complex128.

    Tensors of other numbers stay as they are.
    """
    return map_arguments(value, _raise_tensor)


def _raise_tensor(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_floating_point():
        return value.double()
    return value.to(torch.complex128) if value.is_complex() else value
