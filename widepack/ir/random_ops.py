"""Replaces random ops by fixed ones: dropout returns its input, a draw returns one number everywhere.

The result is what can be compared of a program that draws random numbers.
requires: a member program, or a wide one. ensures: the same nodes under the same names, none of which draws.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from widepack_artifacts.program import Node, Program, Tag

from . import ops
from .edit import all_nodes

_ONES = {"aten.bernoulli.p", "aten.bernoulli.default"}
_LIKE = ops.full_names("rand_like randn_like exponential cauchy geometric log_normal")
_SIZED = {"aten.rand.default": 0, "aten.randn.default": 0, "aten.randint.default": 1, "aten.randint.low": 2}
"""The position of the sizes among the arguments."""
_SUMS = {"aten.normal.Tensor_Tensor": "aten.add.Tensor", "aten.normal.Tensor_float": "aten.add.Scalar"}
_OFF = {"train": False, "training": False, "dropout_p": 0.0, "dropout": 0.0}
"""The arguments that switch dropout off."""


def uses_random_ops(program: Program) -> bool:
    """Whether a program draws random numbers, so that its outputs differ from call to call."""
    return any(True for _ in random_nodes(program))


def random_nodes(program: Program) -> Iterator[Node]:
    """The nodes of a program that draw random numbers."""
    return (n for n in all_nodes(program) if n.body is None and not ops.pure(n.op, n.args, n.kwargs))


def without_randomness(program: Program) -> Program | None:
    """The program without random ops; None if it has a random op that this module does not know."""
    nodes = []
    for node in program.nodes:
        fixed = _fixed(node)
        if fixed is None:
            return None
        nodes.append(fixed)
    return replace(program, nodes=tuple(nodes))


def _fixed(node: Node) -> Node | None:
    """The node, or what takes its place; None if it still draws."""
    if node.body is not None:
        body = without_randomness(node.body)
        return None if body is None else replace(node, body=body)
    op, args = node.op, node.args
    if ops.pure(op, args, node.kwargs):
        return node
    kept = {k: v for k, v in node.kwargs.items() if k in ("dtype", "device", "memory_format")}
    if op in _ONES or op in _LIKE:
        args = args[0], 1.0 if op in _ONES else 0.5
        return replace(node, op="aten.full_like.default", args=args, kwargs=kept)
    if op == "aten.uniform.default":
        bounds = [*args[1:3], *[0.0, 1.0][len(args) - 1 :]]
        return replace(node, op="aten.full_like.default", args=(args[0], sum(bounds) / 2), kwargs=kept)
    if op == "aten.randperm.default":
        return replace(node, op="aten.arange.default", args=args[:1], kwargs=kept)
    if op == "aten.poisson.default":
        return replace(node, op="aten.clone.default", args=args[:1], kwargs={})
    if op in _SIZED:
        whole = "randint" in op
        kept.pop("memory_format", None)
        kwargs = {"dtype": Tag("dtype", "int64"), **kept} if whole else kept
        return replace(
            node, op="aten.full.default", args=(args[_SIZED[op]], 0 if whole else 0.5), kwargs=kwargs
        )
    if op in _SUMS:
        return replace(node, op=_SUMS[op], args=(args[0], args[1] if len(args) > 1 else 1.0), kwargs={})
    names = [name for name, _, _ in ops.arguments(op)]
    args = tuple(_OFF.get(name, value) for name, value in zip(names, args))
    kwargs = {k: _OFF.get(k, v) for k, v in node.kwargs.items()}
    return replace(node, args=args, kwargs=kwargs) if ops.pure(op, args, kwargs) else None
