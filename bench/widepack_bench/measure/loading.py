"""Loads an artifact on one backend, and returns the wide program that a call runs, with its weights."""

from __future__ import annotations

import os
from inspect import signature
from typing import TYPE_CHECKING, Any

import widepack
from widepack.inference.entry import WideEntry
from widepack.spec.entries import FORWARD
from widepack_artifacts.program import Program

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


def entry_of(ens: Any, entry: str = "") -> WideEntry:
    """Returns one entry of a loaded model; an entry is returned as it is."""
    if isinstance(ens, WideEntry):
        return ens
    wide_entry: WideEntry = ens.entry(entry or ens.manifest.entry or FORWARD)
    return wide_entry


def weights_of(entry: WideEntry, program: Program) -> list[Any]:
    """Returns a value for each weight of a wide program, on the model's device."""
    return [entry.programs.artifact.weights.get(s.source) for s in program.weights]
