"""Derives the costs of the entries of an artifact, and writes them to the file `costs-<hash>.json`."""

from __future__ import annotations

from collections.abc import Iterable

from widepack_artifacts import strict_json
from widepack_artifacts.costs import STEM, Costs, documents
from widepack_artifacts.writer import Writer

from ..capture.capture import Captured
from ..costs.derive import ModelFacts, derive
from ..errors import WidepackError
from ..ir.kinds import slot_kinds
from ..simplify.member_programs import MemberPrograms


def facts_of(captured: Captured, name: str) -> ModelFacts:
    """Returns what a capture tells of a model. name: of the model."""
    return ModelFacts(
        sizes=captured.sizes,
        model=name,
        dims={d: (least, most) for d, (least, most, _) in captured.dims.items()},
        guards=[g.expr for g in captured.guards],
        modules=captured.modules,
        classes=captured.classes,
    )


def write_costs(writer: Writer, entries: Iterable[tuple[str, MemberPrograms, ModelFacts]]) -> None:
    """Writes the costs of entries. entries: the name of each, its programs, what is known of its model."""
    found = {name: _costs(entry, facts) for name, entry, facts in entries}
    kept = {name: costs for name, costs in found.items() if costs is not None}
    if kept:
        writer.file(STEM, "json", strict_json.canonical(documents(kept)))


def _costs(entry: MemberPrograms, facts: ModelFacts) -> Costs | None:
    """Returns the costs of an entry. None if its members have different shapes, or a size has no formula: no
    answer depends on them.
    """
    if len(entry.programs) > 1:
        return None
    (program,) = entry.programs
    try:
        return derive(program, slot_kinds(program, entry.kind, {s.input for s in entry.states}), facts)
    except (WidepackError, RuntimeError):  # torch raises a RuntimeError for sizes that are data
        return None
