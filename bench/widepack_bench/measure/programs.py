"""The wide program that a call runs, with its weights, for whoever counts or times it node by node."""

from __future__ import annotations

from typing import Any

from widepack.spec.entries import FORWARD
from widepack.inference.entry import WideEntry
from widepack_artifacts.program import Program


def entry_of(ens: Any, entry: str = "") -> WideEntry:
    """One entry of a loaded model; of an entry, itself."""
    if isinstance(ens, WideEntry):
        return ens
    found: WideEntry = ens.entry(entry or ens.manifest.entry or FORWARD)
    return found


def weights_of(entry: WideEntry, program: Program) -> list[Any]:
    """A value for each weight of a wide program, on the model's device."""
    return [entry.programs.held.weight(s.source) for s in program.weights]
