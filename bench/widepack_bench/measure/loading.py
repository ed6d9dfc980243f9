"""Loads an artifact on one backend, for the race and for the processes of `--full`."""

from __future__ import annotations

import os
from inspect import signature
from typing import TYPE_CHECKING, Any

import widepack

if TYPE_CHECKING:
    from widepack import WideModel

GRAPH = "+graph"
"""The end of a backend's name for a load with CUDA graphs."""


def load_on(path: str | os.PathLike[str], device: str, backend: str, dtype: str | None = None) -> WideModel:
    """Loads an artifact on a backend, in another dtype if one is named. The backend compiles at once.

    backend: its name; with `+graph` at the end calls run by CUDA graphs.
    Raises: whatever `widepack.load` raises.
    """
    name, graph = backend.removesuffix(GRAPH), backend.endswith(GRAPH)
    takes = "compile" in signature(widepack.load).parameters and name not in ("auto", "eager")
    more: dict[str, Any] = {"compile": "now"} if takes else {}
    return widepack.load(path, device=device, dtype=dtype, backend=name, graph=graph, **more)
