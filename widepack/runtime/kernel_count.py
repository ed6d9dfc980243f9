"""Counts the kernels that a program starts, where torch dispatches them.

Views and arithmetic on sizes do not count. A composite op counts as the ops that implement it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from ..ir.torch_internals import base_name, schema_of


class KernelCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base has no types
    """Counts the ops that run in the block, without views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not is_view(func):
            self.count += 1
        return result


def is_view(op: Any) -> bool:
    """Whether the op only returns a view, or allocates memory, and computes nothing."""
    aliased = any(r.alias_info is not None and not r.alias_info.is_write for r in schema_of(op).returns)
    return aliased or base_name(op) in (
        "_unsafe_view",
        "detach",
        "alias",
        "_reshape_alias",
        "empty",
        "empty_strided",
        "sym_size",
        "sym_numel",
        "sym_stride",
    )


class _Counted(fx.Interpreter):
    """Runs a graph, frees each value after its last use, and counts the kernels of some nodes."""

    def __init__(self, graph: fx.GraphModule, counted: Sequence[bool]) -> None:
        super().__init__(graph)
        made = [n for n in graph.graph.nodes if n.op in ("call_function", "call_module")]
        self.counted = {n for n, wanted in zip(made, counted, strict=True) if wanted}
        self.count = 0

    def run_node(self, n: fx.Node) -> Any:
        if n not in self.counted:
            return super().run_node(n)
        with KernelCounter() as counter:
            found = super().run_node(n)
        self.count += counter.count
        return found


def kernels(graph: fx.GraphModule, args: Sequence[Any], counted: Sequence[bool]) -> int:
    """The number of kernels that one call starts.

    counted: for each node whether it counts; a prologue runs once and does not.
    """
    run = _Counted(graph, counted)
    with (
        torch.inference_mode(False),
        torch.no_grad(),
    ):  # inference mode would hide the ops behind composite ops
        run.run(*args)
    return run.count
