"""Derives the costs of the entries of an artifact, and writes them to the file `costs-<hash>.json`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from widepack_artifacts import strict_json
from widepack_artifacts.costs import Costs, documents
from widepack_artifacts.costs_file import STEM
from widepack_artifacts.program import Kind, Program
from widepack_artifacts.writer import Writer

from ..costs.derive import ModelFacts, derive
from ..errors import WidepackError
from ..ir.kinds import slot_kinds
from ..spec.state import CarriedState
from .entry import BuildEntry


class CostedEntry(Protocol):
    """An entry of a build or of an artifact, as its costs need it."""

    entry: str
    programs: list[Program]
    kind: Callable[[str], Kind]
    states: tuple[CarriedState, ...]

    @property
    def sizes(self) -> Mapping[str, int]: ...
    @property
    def bounds(self) -> Mapping[str, tuple[int, int | None]]: ...
    @property
    def conditions(self) -> Sequence[Any]: ...


def write_build_costs(writer: Writer, entries: Iterable[BuildEntry], name: str) -> None:
    """Writes the costs of the entries of a build.

    name: of the model, where its class is not known.
    """
    found = {}
    for entry in entries:
        captured = entry.first
        model = captured.classes.get("", "") or name
        found[entry.entry] = _costs(entry, model, captured.modules, captured.classes)
    _write(writer, found)


def write_revised_costs(writer: Writer, entries: Iterable[CostedEntry], before: Mapping[str, Costs]) -> None:
    """Writes the costs of the entries of an artifact whose kinds or programs changed. before: by entry."""
    _write(
        writer,
        {
            e.entry: _costs(e, old.model, old.modules, old.classes)
            for e in entries
            if (old := before.get(e.entry)) is not None
        },
    )


def _write(writer: Writer, found: Mapping[str, Costs | None]) -> None:
    kept = {name: costs for name, costs in found.items() if costs is not None}
    if kept:
        writer.file(STEM, "json", strict_json.canonical(documents(kept)))


def _costs(
    entry: CostedEntry, model: str, modules: Mapping[str, str], classes: Mapping[str, str]
) -> Costs | None:
    """Returns the costs of an entry. None if its members have different shapes, or a size has no formula: no
    answer depends on them.
    """
    if len(entry.programs) > 1:
        return None
    (program,) = entry.programs
    slots = slot_kinds(program, entry.kind, {s.input for s in entry.states})
    facts = ModelFacts(
        sizes=entry.sizes,
        model=model,
        dims=entry.bounds,
        guards=entry.conditions,
        modules=modules,
        classes=classes,
    )
    try:
        return derive(program, slots, facts)
    except (WidepackError, RuntimeError):  # torch raises a RuntimeError for sizes that are data
        return None
