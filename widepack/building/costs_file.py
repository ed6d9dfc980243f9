"""Derives the costs of the entries of a build, and writes them to the file `costs-<hash>.json`."""

from __future__ import annotations

from collections.abc import Sequence

from widepack_artifacts import strict_json
from widepack_artifacts.costs import Costs, documents
from widepack_artifacts.costs_file import STEM
from widepack_artifacts.program import Kind
from widepack_artifacts.writer import Writer

from ..costs.derive import ModelFacts, derive
from ..errors import WidepackError
from .entry import BuildEntry


def write_costs(writer: Writer, entries: Sequence[BuildEntry], name: str) -> None:
    """Writes the costs of entries. name: of the model.

    An entry whose members have different shapes, or whose sizes have no formula, is left out: no answer
    depends on this file.
    """
    found: dict[str, Costs] = {}
    for entry in entries:
        if len(entry.programs) > 1:
            continue
        try:
            found[entry.entry] = _costs(entry, name)
        except (WidepackError, RuntimeError):  # torch raises a RuntimeError for sizes that are data
            continue
    if found:
        writer.file(STEM, "json", strict_json.canonical(documents(found)))


def _costs(entry: BuildEntry, name: str) -> Costs:
    program, captured = entry.programs[0], entry.first
    products = {f.weight.name for f in entry.table.factored}
    slots: dict[str, Kind] = {
        s.name: "stacked" if s.source in products else entry.kind(s.source) for s in program.weights
    }
    states = {s.input for s in entry.states}
    for i, slot in enumerate(program.inputs):
        slots[slot.name] = "stacked" if i in states else "shared"
    facts = ModelFacts(
        sizes=entry.sizes,
        model=captured.classes.get("", "") or name,
        dims=entry.bounds,
        guards=entry.conditions,
        modules=captured.modules,
        classes=captured.classes,
    )
    return derive(program, slots, facts)
