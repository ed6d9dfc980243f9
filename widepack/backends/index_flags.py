"""Makes compiled programs notice an index that is out of range.

The code of torch's compiler ends the process at such an index, and takes -1 for the last row where the op
refuses it. Here each op that reads or writes at indices gets indices that are in range, and a flag says
whether they were so before. A flagged program has one output more: whether any index was out of range. Its
caller then runs the flat graph, which raises the error of the op.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from widepack_artifacts.program import Node, Program

from ..ir import ops

_ONE_DIM = """
    gather index_select scatter.src scatter.value scatter.reduce scatter.value_reduce scatter_add
    scatter_reduce.two index_add index_copy index_reduce index_fill.int_Scalar index_fill.int_Tensor
"""
_WITH_NEGATIVE = ("aten.index_fill.int_Scalar", "aten.index_fill.int_Tensor")


def _in_range(index: Tensor, size: Any, negative: bool = False) -> tuple[Tensor, Tensor]:
    """Returns the indices with 0 in the place of those that are out of range, and whether there are any."""
    wrong = (index < (-size if negative else 0)) | (index >= size)
    return torch.where(wrong, 0, index), wrong.any()


def _one_dim(op: Any, negative: bool) -> Callable[..., tuple[Any, Tensor]]:
    """Returns a flagged op with the operands (self, dim, index, ...) or (self, index of dim 0, ...)."""
    names = [a[0] for a in ops.arguments(ops.name_of(op))]

    def run(*args: Any, **kwargs: Any) -> tuple[Any, Tensor]:
        given = {**dict(zip(names, args)), **kwargs}
        x, dim = given["self"], given["dim"]
        size = x.shape[dim] if x.dim() else 1
        given["index"], flag = _in_range(given["index"], size, negative)
        return op(**given), flag

    return run


def _embedding(op: Any) -> Callable[..., tuple[Any, Tensor]]:
    def run(weight: Tensor, indices: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Tensor]:
        indices, flag = _in_range(indices, weight.shape[0])
        return op(weight, indices, *args, **kwargs), flag

    return run


def _one_hot(op: Any) -> Callable[..., tuple[Any, Tensor]]:
    def run(self: Tensor, num_classes: int = -1) -> tuple[Any, Tensor]:
        self, flag = _in_range(self, num_classes)
        return op(self, num_classes), flag

    return run


def _along(op: Any) -> Callable[..., tuple[Any, Tensor]]:
    def run(self: Tensor, indices: Tensor, dim: int | None = None) -> tuple[Any, Tensor]:
        size = self.numel() if dim is None else self.shape[dim]
        indices, flag = _in_range(indices, size)
        return op(self, indices, dim), flag

    return run


def _several(op: Any) -> Callable[..., tuple[Any, Tensor]]:
    def run(self: Tensor, indices: Sequence[Tensor | None], *args: Any, **kwargs: Any) -> tuple[Any, Tensor]:
        found, flag = list(indices), torch.zeros((), dtype=torch.bool, device=self.device)
        if not any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in found):
            for dim, index in enumerate(found):
                if index is not None:
                    found[dim], wrong = _in_range(index, self.shape[dim], True)
                    flag = flag | wrong
        return op(self, found, *args, **kwargs), flag

    return run


def _division(op: Any) -> Callable[..., tuple[Any, Tensor]]:
    """Returns a flagged division. In integers, 0 is no divisor, nor is -1 of the least number."""

    def run(self: Tensor, other: Tensor, **kwargs: Any) -> tuple[Any, Tensor]:
        kind = torch.result_type(self, other)
        if kind.is_floating_point or kind.is_complex or kind is torch.bool:
            return op(self, other, **kwargs), torch.zeros((), dtype=torch.bool, device=self.device)
        wrong = (other == 0) | ((other == -1) & (self == torch.iinfo(kind).min))
        return op(self, torch.where(wrong, 1, other), **kwargs), wrong.any()

    return run


@cache
def _flagged_ops() -> dict[str, Callable[..., tuple[Any, Tensor]]]:
    """Returns for each op its flagged form: a function that returns the op's result and a flag."""
    found: dict[str, Callable[..., tuple[Any, Tensor]]] = {}
    for name in map(ops.full_name, _ONE_DIM.split()):
        found[name] = _one_dim(ops.resolve(name), name in _WITH_NEGATIVE)
    found["aten.embedding.default"] = _embedding(ops.resolve("aten.embedding.default"))
    found["aten.one_hot.default"] = _one_hot(ops.resolve("aten.one_hot.default"))
    found["aten.take_along_dim.default"] = _along(ops.resolve("aten.take_along_dim.default"))
    found["aten.div.Tensor_mode"] = _division(ops.unchecked("aten.div.Tensor_mode"))
    for name in ("aten.index.Tensor", "aten.index_put.default"):
        found[name] = _several(ops.resolve(name))
    return found


_UNGUARDED = frozenset(
    {
        "aten.cross_entropy_loss.default",
        "aten.max_unpool2d.default",
        "aten.max_unpool3d.default",
        "aten.multi_margin_loss.default",
        "aten.multilabel_margin_loss.default",
        "aten.nll_loss.default",
        "aten.nll_loss_forward.default",
        "aten.nll_loss_nd.default",
        "aten.nll_loss2d.default",
        "aten.put.default",
        "aten.take.default",
    }
)
"""Ops that read or write at indices, and that have no flagged form."""


def unguarded(program: Program) -> Node | None:
    """Returns a node whose compiled code would end the process at an index that is out of range."""
    for node in program.nodes:
        found = unguarded(node.body) if node.body is not None else node if node.op in _UNGUARDED else None
        if found is not None:
            return found
    return None


def is_flagged(program: Program) -> bool:
    """Returns whether the compiled form of a flat program has a flag as its last output."""
    return any(node.op in _flagged_ops() for node in program.nodes)


def add_flags(graph: fx.Graph, program: Program) -> None:
    """Replaces the ops of a flat program's graph by their flagged forms, and adds the flag as an output."""
    made = [n for n in graph.nodes if n.op == "call_function"]
    flags = []
    for node, written in zip(made, program.nodes, strict=True):
        function = _flagged_ops().get(written.op)
        if function is None:
            continue
        with graph.inserting_after(node):
            flag = graph.call_function(operator.getitem, (node, 1))
            result = graph.call_function(operator.getitem, (node, 0))
        node.replace_all_uses_with(result, delete_user_cb=lambda user, own=(flag, result): user not in own)
        node.target = function
        flags.append(flag)
    if not flags:
        return
    (output,) = (n for n in graph.nodes if n.op == "output")
    with graph.inserting_before(output):
        whole = flags[0]
        for flag in flags[1:]:
            whole = graph.call_function(torch.logical_or, (whole, flag))
    output.args = ((*output.args[0], whole),)
