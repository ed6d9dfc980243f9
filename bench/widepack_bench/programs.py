"""The wide program that a call runs, with its weights, for whoever counts or times it node by node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from widepack.entries import FORWARD
from widepack.wide_entry import Bound, WideEntry
from widepack_artifacts.program import Program


def entry_of(ens: Any, entry: str = "") -> WideEntry:
    """One entry of a loaded model; of an entry, itself."""
    if isinstance(ens, WideEntry):
        return ens
    found: WideEntry = ens.entry(entry or ens.manifest.entry or FORWARD)
    return found


def bound(entry: WideEntry, pattern: str, sizes: Mapping[str, int]) -> Bound:
    """The bound program of a pattern for these sizes: the one that a call of them runs."""
    programs = entry._programs(pattern)
    size = entry._scaled(sizes)
    return next((b for b in programs if b.fits(size)), programs[-1])


def weights_of(entry: WideEntry, program: Program) -> list[Any]:
    """A value for each weight of a wide program, on the model's device."""
    return [entry._held.weight(s.source) for s in program.weights]


def member_program(entry: WideEntry, index: int) -> tuple[Program, list[Any]]:
    """A loaded member's own program, and a value for each of its weights."""
    i = entry._held.chosen[index]
    program = entry._held.reader.program(entry.entry.member[entry.entry.signatures[i]])
    return program, [entry._held.part(s.source, i).to(entry._held.device) for s in program.weights]
