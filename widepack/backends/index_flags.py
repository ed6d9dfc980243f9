"""Adds flags for indices that are out of range, and for divisions of integers by 0, to a flat program.

`eager` refuses both. Compiled code of torch ends the process at an index that is out of range, and ONNX
Runtime takes -1 for the last row; a division of integers by 0 ends the process or gives a number. Here each
op that reads or writes at indices gets indices that are in range, and each division a divisor that is
possible. A flag says whether they were so before. A program with such ops has one output more: whether any
flag is set. The caller then runs the flat graph, which raises the error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from widepack_artifacts.program import Node, Output, Program, Ref, Tag

from ..ir import ops
from ..ir.edit import all_nodes
from ..ir.op_records import record

_ONE_DIM = """
    gather index_select scatter.src scatter.value scatter.reduce scatter.value_reduce scatter_add
    scatter_reduce.two index_add index_copy index_reduce index_fill.int_Scalar index_fill.int_Tensor
"""
_WITH_NEGATIVE = ("aten.index_fill.int_Scalar", "aten.index_fill.int_Tensor")
_MASKS = (torch.bool, torch.uint8)


class _Flags:
    """Builds the flagged form of a program.

    values: the fake value of each weight, input and node of the program, by name.
    """

    def __init__(self, program: Program, values: Mapping[str, Any]) -> None:
        self.values = values
        self.nodes: list[Node] = []
        self.flags: list[Ref] = []
        self._names = {s.name for s in (*program.weights, *program.inputs)} | {n.name for n in program.nodes}
        self._at = ""

    def add_node(self, node: Node) -> None:
        """Adds a node of the program, in its flagged form if it needs one."""
        self._at = node.name
        flagged = _flagged_ops().get(node.op)
        if flagged is None:
            self.nodes.append(node)
            return
        given = ops.bind(node.op, node.args, node.kwargs)
        changed = flagged(self, given)
        names = [a[0] for a in ops.arguments(node.op)]
        self.nodes.append(
            replace(
                node,
                args=tuple(changed.get(name, a) for name, a in zip(names, node.args)),
                kwargs={k: changed.get(k, a) for k, a in node.kwargs.items()},
            )
        )

    def op(self, name: str, *args: Any, **kwargs: Any) -> Ref:
        """Adds a node and returns its value."""
        number = 0
        while (free := f"{self._at}__flag{number}") in self._names:
            number += 1
        self._names.add(free)
        self.nodes.append(Node(free, name, args, kwargs))
        return Ref(free)

    def size(self, tensor: Ref, dim: Any) -> Any:
        """Returns the size of a dim: a number, or the value of a new node. A tensor without dims has one
        place.
        """
        shape = self.values[tensor.name].shape
        if not len(shape):
            return 1
        return shape[dim] if isinstance(shape[dim], int) else self.op("aten.sym_size.int", tensor, dim)

    def in_range(self, index: Ref, size: Any, negative: bool = False) -> Ref:
        """Returns the indices with 0 in the place of those that are out of range, and flags those."""
        least = (self.op("operator.neg", size) if isinstance(size, Ref) else -size) if negative else 0
        low, high = self.op("aten.lt.Scalar", index, least), self.op("aten.ge.Scalar", index, size)
        return self.replaced(index, self.op("aten.logical_or.default", low, high), 0)

    def replaced(self, tensor: Ref, wrong: Ref, by: int) -> Ref:
        """Returns the tensor with another number where it is wrong, and flags that."""
        self.flags.append(self.op("aten.any.default", wrong))
        return self.op("aten.masked_fill.Scalar", tensor, wrong, by)


Flagged = Callable[[_Flags, dict[str, Any]], dict[str, Any]]
"""Takes an op's arguments by name and returns those that change."""


def _reads(index: str, table: str, dim: str | int, negative: bool = False) -> Flagged:
    """An op that reads or writes a table at indices along a dim, or along the flat table if it has none.

    dim: a number, or the name of the argument.
    """

    def changed(flags: _Flags, given: dict[str, Any]) -> dict[str, Any]:
        at = given.get(dim) if isinstance(dim, str) else dim
        whole = given[table]
        size = flags.op("aten.sym_numel.default", whole) if at is None else flags.size(whole, at)
        return {index: flags.in_range(given[index], size, negative)}

    return changed


def _one_hot(flags: _Flags, given: dict[str, Any]) -> dict[str, Any]:
    return {"self": flags.in_range(given["self"], given.get("num_classes", -1))}


def _several(flags: _Flags, given: dict[str, Any]) -> dict[str, Any]:
    """An op with one index or mask for each dim. A mask covers as many dims as it has."""
    found, dim = list(given["indices"]), 0
    for i, index in enumerate(found):
        value = None if index is None else flags.values[index.name]
        if value is not None and value.dtype not in _MASKS:
            found[i] = flags.in_range(index, flags.size(given["self"], dim), True)
        dim += value.dim() if value is not None and value.dtype in _MASKS else 1
    return {"indices": found}


def _division(flags: _Flags, given: dict[str, Any]) -> dict[str, Any]:
    """A division of two tensors. In integers, 0 is no divisor, nor is -1 of the least number."""
    first, other = given["self"], given["other"]
    kind = torch.result_type(flags.values[first.name], flags.values[other.name])
    if kind.is_floating_point or kind.is_complex or kind is torch.bool:
        return {}
    wrong = flags.op("aten.eq.Scalar", other, 0)
    if kind.is_signed:
        least = flags.op("aten.eq.Scalar", first, torch.iinfo(kind).min)
        least = flags.op("aten.logical_and.default", least, flags.op("aten.eq.Scalar", other, -1))
        wrong = flags.op("aten.logical_or.default", wrong, least)
    return {"other": flags.replaced(other, wrong, 1)}


@cache
def _flagged_ops() -> dict[str, Flagged]:
    """Returns the flagged form of each op that has one."""
    found: dict[str, Flagged] = {}
    for name in map(ops.full_name, _ONE_DIM.split()):
        found[name] = _reads("index", "self", "dim", name in _WITH_NEGATIVE)
    found["aten.embedding.default"] = _reads("indices", "weight", 0)
    found["aten.take_along_dim.default"] = _reads("indices", "self", "dim")
    found["aten.one_hot.default"] = _one_hot
    found["aten.div.Tensor_mode"] = _division
    for name in ("aten.index.Tensor", "aten.index_put.default"):
        found[name] = _several
    return found


_SCALAR_DIVISIONS = frozenset(
    {"aten.div.Scalar_mode", "aten.floor_divide.Scalar", "aten.fmod.Scalar", "aten.remainder.Scalar"}
)


def unguarded(program: Program) -> Node | None:
    """Returns a node without a flagged form that reads or writes at indices, or may divide by 0."""
    nodes = (n for n in all_nodes(program) if n.body is None)
    return next((n for n in nodes if record(n.op).unguarded or _may_divide_by_zero(n)), None)


def _may_divide_by_zero(node: Node) -> bool:
    """Returns whether a node divides by a number that is 0, or that is computed from sizes."""
    if node.op not in _SCALAR_DIVISIONS:
        return False
    other = ops.bind(node.op, node.args, node.kwargs)["other"]
    return isinstance(other, Ref) or other == 0


def is_flagged(program: Program) -> bool:
    """Returns whether the compiled form of a flat program has a flag as its last output."""
    return any(node.op in _flagged_ops() for node in program.nodes)


def add_flags(program: Program, values: Mapping[str, Any]) -> Program:
    """Returns the flagged form of a flat program. A program that is not flagged stays as it is.

    values: the fake value of each weight, input and node, by name.
    """
    if not is_flagged(program):
        return program
    flags = _Flags(program, values)
    for node in program.nodes:
        flags.add_node(node)
    if flags.flags:
        whole = flags.flags[0]
        for flag in flags.flags[1:]:
            whole = flags.op("aten.logical_or.default", whole, flag)
    else:
        whole = flags.op(
            "aten.full.default", [], False, dtype=Tag("dtype", "bool"), device=Tag("device", "self")
        )
    return replace(program, nodes=tuple(flags.nodes), outputs=(*program.outputs, Output(whole, "stacked")))
