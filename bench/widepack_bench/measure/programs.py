"""Returns the wide program that a call runs, with its weights, for counting and for timing nodes."""

from __future__ import annotations

from typing import Any

from widepack.inference.entry import WideEntry
from widepack.spec.entries import FORWARD
from widepack_artifacts.program import Program


def entry_of(ens: Any, entry: str = "") -> WideEntry:
    """Returns one entry of a loaded model; an entry is returned as it is."""
    if isinstance(ens, WideEntry):
        return ens
    wide_entry: WideEntry = ens.entry(entry or ens.manifest.entry or FORWARD)
    return wide_entry


def weights_of(entry: WideEntry, program: Program) -> list[Any]:
    """Returns a value for each weight of a wide program, on the model's device."""
    return [entry.programs.artifact.weights.get(s.source) for s in program.weights]
