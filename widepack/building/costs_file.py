"""Derives the costs of the entries of an artifact, and writes them to the file `costs-<hash>.json`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from widepack_artifacts import strict_json
from widepack_artifacts.costs import Costs, documents
from widepack_artifacts.costs_file import STEM
from widepack_artifacts.program import Kind, Program
from widepack_artifacts.weights import Weights
from widepack_artifacts.writer import Writer

from ..costs.derive import ModelFacts, derive
from ..costs.mask_weights import is_number, mask_slots
from ..errors import WidepackError
from ..ir.kinds import slot_kinds
from ..spec.state import CarriedState
from .entry import BuildEntry
from .mask_buffers import known_masks


class CostedEntry(Protocol):
    """An entry of a build or of an artifact, as its costs need it."""

    entry: str
    programs: list[Program]
    kind: Callable[[str], Kind]
    states: tuple[CarriedState, ...]
    count: int

    @property
    def sizes(self) -> Mapping[str, int]: ...
    @property
    def bounds(self) -> Mapping[str, tuple[int, int | None]]: ...
    @property
    def conditions(self) -> Sequence[Any]: ...
    def weight(self, name: str, member: int, files: Weights, /) -> Tensor: ...


def write_build_costs(writer: Writer, entries: Iterable[BuildEntry], name: str, files: Weights) -> None:
    """Writes the costs of the entries of a build.

    name: of the model, where its class is not known. files: the weights, of which masks in buffers are read.
    """
    found = {}
    for entry in entries:
        captured = entry.first
        model = captured.classes.get("", "") or name
        found[entry.entry] = _costs(entry, files, model, captured.modules, captured.classes)
    _write(writer, found)


def write_revised_costs(
    writer: Writer, entries: Iterable[CostedEntry], before: Mapping[str, Costs], files: Weights
) -> None:
    """Writes the costs of the entries of an artifact whose kinds, programs or masks in buffers changed.

    before: by entry. files: as in `write_build_costs`.
    """
    _write(
        writer,
        {
            e.entry: _costs(e, files, old.model, old.modules, old.classes)
            for e in entries
            if (old := before.get(e.entry)) is not None
        },
    )


def _write(writer: Writer, found: Mapping[str, Costs | None]) -> None:
    kept = {name: costs for name, costs in found.items() if costs is not None}
    if kept:
        writer.file(STEM, "json", strict_json.canonical(documents(kept)))


def reads_masks(entry: CostedEntry) -> bool:
    """Whether the costs of an entry depend on the data of weights, which may be masks of attention."""
    return any(not is_number(slot) for program in entry.programs for slot in mask_slots(program))


def _costs(
    entry: CostedEntry, files: Weights, model: str, modules: Mapping[str, str], classes: Mapping[str, str]
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
        masks=known_masks(program, entry.kind, entry.count, lambda name, i: entry.weight(name, i, files)),
    )
    try:
        return derive(program, slots, facts)
    except (WidepackError, RuntimeError):  # torch raises a RuntimeError for sizes that are data
        return None
