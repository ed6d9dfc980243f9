"""Kernels of a program, counted where torch dispatches them: views and size arithmetic cost nothing, composite ops count as what they are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base has no types
    """Counts the ops that come by, views left out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not is_view(func):
            self.count += 1
        return result


def is_view(op: Any) -> bool:
    """Whether the op's result aliases its input and nothing is computed."""
    schema = op._schema
    aliased = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    return aliased or op._opname in (
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


def kernels(run: Callable[..., Any], args: Sequence[Any]) -> int:
    """How many kernels one call starts."""
    with torch.inference_mode(False), torch.no_grad(), Counter() as counter:  # inference mode would hide what composite ops are made of
        run(*args)
    return int(counter.count)
