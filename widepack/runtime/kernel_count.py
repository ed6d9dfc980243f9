"""Counts the kernels that a program starts, where torch dispatches them.

Views and arithmetic on sizes do not count. A composite op counts as the ops that implement it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from widepack_artifacts.program import Program

from ..ir.torch_internals import base_name, schema_of
from .graph_module import graph_module
from .prologue import split

NO_KERNEL = frozenset(
    [
        "_assert_scalar",
        "_assert_tensor_metadata",
        "as_strided_",
        "empty_like",
        "lift_fresh",
        "new_empty",
        "squeeze_",
        "t_",
        "transpose_",
        "unsqueeze_",
    ]
)
"""Ops that start no kernel, and are no views: they check, allocate, or change a tensor's sizes in place."""


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


def kernels(program: Program, weights: Mapping[str, Any], inputs: Sequence[torch.Tensor]) -> int:
    """The number of kernels that one call on the CPU starts, without the prologue, which runs once.

    weights: by source.
    """
    parts, device = split(program), torch.device("cpu")
    # inference mode would hide the ops behind composite ops
    with torch.inference_mode(False), torch.no_grad():
        given = graph_module(parts.prologue, device).forward(*(weights[s.source] for s in program.weights))
        counter = KernelCounter()
        with counter:
            graph_module(parts.main, device).forward(*given, *inputs)
    return counter.count
