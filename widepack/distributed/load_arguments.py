"""Names the options of a load that several functions pass on."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any, TypedDict

import torch

from ..errors import UsageError
from ..system.progress import Report


class LoadArguments(TypedDict, total=False):
    """The options of `widepack.load`, except the device."""

    dtype: str | torch.dtype | None
    members: Sequence[int | str] | None
    strategies: str | Sequence[str] | None
    simplify: bool
    backend: str
    verify: str
    expect: str | None
    prologue: bool
    warmup: bool
    threads: int | None
    compile: str | None
    cache: str | PathLike[str] | None
    progress: Report | None
    limit: float | None
    allow_ops: Sequence[Any]
    memory: str
    weights: str | None
    max_error: float | None
    graph: bool | str


def refuse_weights(options: LoadArguments) -> None:
    """Refuses int8 weights for members in several parts. Raises: UsageError."""
    if options.get("weights") is not None or options.get("max_error") is not None:
        raise UsageError(
            "weights and max_error are for a load on one device; leave them out, or load without a list of"
            " devices and in one process"
        )
