"""Replaces random ops by fixed ones: dropout returns its input, a draw returns one number everywhere.

The result is what can be compared of a program that draws random numbers.
requires: a member program, or a wide one. ensures: the same nodes under the same names, none of which draws.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from widepack_artifacts.program import Node, Program, Tag

from . import ops
from .edit import all_nodes

_ONES = {"aten.bernoulli.p", "aten.bernoulli.default"}
_LIKE = {
    f"aten.{n}.default"
    for n in ("rand_like", "randn_like", "exponential", "cauchy", "geometric", "log_normal")
}
_SIZED = {
    "aten.rand.default": 0,
    "aten.randn.default": 0,
    "aten.randint.default": 1,
    "aten.randint.low": 2,
}  # the position of the sizes among the arguments
_SUMS = {"aten.normal.Tensor_Tensor": "aten.add.Tensor", "aten.normal.Tensor_float": "aten.add.Scalar"}
_REPLACED = {"aten.randperm.default": "aten.arange.default", "aten.poisson.default": "aten.clone.default"}
_SWITCHES = ("train", "training")
_CHANCES = ("dropout_p", "dropout")


def draws(program: Program) -> bool:
    """Whether a program draws random numbers, so that its answers differ from call to call."""
    return any(True for _ in draws_in(program))


def draws_in(program: Program) -> Iterator[Node]:
    """The nodes of a program that draw random numbers."""
    return (n for n in all_nodes(program) if n.body is None and not ops.pure(n.op, n.args, n.kwargs))


def rested(program: Program) -> Program | None:
    """The program without random ops; None if it has a random op that this module does not know."""
    nodes = []
    for node in program.nodes:
        fixed = _rested(node)
        if fixed is None:
            return None
        nodes.append(fixed)
    return replace(program, nodes=tuple(nodes))


def _rested(node: Node) -> Node | None:
    if node.body is not None:
        body = rested(node.body)
        return None if body is None else replace(node, body=body)
    if ops.pure(node.op, node.args, node.kwargs):
        return node
    kept = {k: v for k, v in node.kwargs.items() if k in ("dtype", "device", "memory_format")}
    if node.op in _ONES or node.op in _LIKE:
        return replace(
            node,
            op="aten.full_like.default",
            args=(node.args[0], 1.0 if node.op in _ONES else 0.5),
            kwargs=kept,
        )
    if node.op == "aten.uniform.default":
        bounds = [*node.args[1:3], *[0.0, 1.0][len(node.args) - 1 :]]
        return replace(node, op="aten.full_like.default", args=(node.args[0], sum(bounds) / 2), kwargs=kept)
    if node.op in _REPLACED:
        args = node.args[:1]
        return replace(
            node, op=_REPLACED[node.op], args=args, kwargs={} if "clone" in _REPLACED[node.op] else kept
        )
    if node.op in _SIZED:
        sizes = node.args[_SIZED[node.op]]
        whole = "randint" in node.op
        more = kept if "dtype" in kept or not whole else {**kept, "dtype": Tag("dtype", "int64")}
        return replace(
            node,
            op="aten.full.default",
            args=(sizes, 0 if whole else 0.5),
            kwargs={k: v for k, v in more.items() if k != "memory_format"},
        )
    if node.op in _SUMS:
        return replace(
            node,
            op=_SUMS[node.op],
            args=(node.args[0], node.args[1] if len(node.args) > 1 else 1.0),
            kwargs={},
        )
    return _switched_off(node)


def _switched_off(node: Node) -> Node | None:
    """A node with its dropout switched off by its arguments; None if it still draws."""
    names = [name for name, _, _ in ops.arguments(node.op)]
    off: Mapping[str, Any] = {
        **{n: False for n in names if n in _SWITCHES},
        **{n: 0.0 for n in names if n in _CHANCES},
    }
    args = tuple(off.get(name, value) for name, value in zip(names, node.args))
    kwargs = {k: off.get(k, v) for k, v in node.kwargs.items()}
    return replace(node, args=args, kwargs=kwargs) if ops.pure(node.op, args, kwargs) else None
