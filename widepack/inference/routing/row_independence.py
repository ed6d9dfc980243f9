"""Finds out whether the rows of an entry's batch are independent: by the walk, and by trials.

An artifact records what its build found. The record is no proof, since a forged file says anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from widepack_artifacts.entry import Rows
from widepack_artifacts.program import Program

from ...errors import ArtifactError, LoweringError
from ...ir.cast import raise_value, raised
from ...ir.tensor_type import tensor_type
from ...rows.trials import RowTrials, Run
from ...rows.verdict import ExaminedEntry
from ...runtime.admission import check_member_run, guarded
from ...runtime.budget import Budget
from ...runtime.graph_module import graph_module
from ...system import deadline
from ...system.user_cache import cache_key, noted, remember
from ...version import __version__
from ..entry_programs import EntryPrograms

NOTES, CALLERS = "rows", "callers"
"""The kinds of notes in the user's cache: of an entry's rows, and of rows that several callers share."""
PROVED = "proved"


def rows_of_entry(programs: EntryPrograms) -> Rows:
    """Returns whether the rows of an entry are independent, derived from its member programs.

    A record in the artifact that denies it is believed, and one that affirms it is not: then the walk runs,
    and trials for a program that it does not prove. What was found is kept in the user's cache for the next
    process.
    """
    recorded = programs.entry.rows
    if recorded is not None and not recorded.independent:
        return recorded
    if programs.examined_rows is None:
        key = _key(programs)
        if noted(key, NOTES) == PROVED and recorded is not None and recorded.proved:
            programs.examined_rows = recorded
            return recorded
        with _bounded(programs):
            found = _derived(programs, recorded)
        if found == recorded and found.proved:
            remember(key, NOTES, PROVED)
        programs.examined_rows = found
    return programs.examined_rows


def rows_of_callers(programs: EntryPrograms) -> Rows:
    """Returns whether several callers may share a batch: no row changes another one's answer, for all values.

    Trials do not suffice, since an artifact may know them. And the programs of a call must be those that the
    member programs become here, since the walk has read the member programs.
    """
    rows = rows_of_entry(programs)
    if not rows.independent or not rows.proved:
        why = rows.reason if rows.independent else ""
        return Rows(
            rows.dim, False, rows.proved, f"no rule proves it for all values ({why})" if why else rows.reason
        )
    key = _key(programs)
    if noted(key, CALLERS) == PROVED:
        return rows
    with _bounded(programs):
        reason = programs.source.difference_of_stored()
    if reason:
        return Rows(rows.dim, False, False, reason)
    remember(key, CALLERS, PROVED)
    return rows


def _derived(programs: EntryPrograms, recorded: Rows | None) -> Rows:
    """Returns what the walk finds out about an entry, and trials where it proves nothing."""
    entry = examined(programs)
    if recorded is not None and recorded.proved and entry.proved_along(recorded.dim):
        return recorded
    return entry.rows()


def _key(programs: EntryPrograms) -> str:
    """Returns the key of what was found about the loaded members of an entry by this version of widepack."""
    artifact = programs.artifact
    options = (
        f"{artifact.options.simplify} {artifact.options.strategies} {artifact.cast and artifact.cast.dtype}"
    )
    loaded = f"{artifact.device} {tuple(artifact.chosen)} {options}"
    return cache_key(__version__, artifact.manifest.digest, programs.name, loaded)


@contextmanager
def _bounded(programs: EntryPrograms) -> Iterator[None]:
    """Limits the time of an examination. Its errors are those of the artifact."""
    entry = programs.entry
    nodes = [len(programs.artifact.program(file, programs.name).nodes) for file in entry.member]
    try:
        with guarded(_title(programs)), deadline.within(60 + 0.5 * sum(nodes)):
            yield
    except LoweringError as e:
        raise ArtifactError(f"{_title(programs)}: {e}") from e


def examined(programs: EntryPrograms) -> ExaminedEntry:
    """Returns an entry with one member program for each shape signature."""
    signatures = [programs.entry.signatures[i] for i in programs.artifact.chosen]
    places = [signatures.index(signature) for signature in dict.fromkeys(signatures)]
    return ExaminedEntry(
        [programs.source.member_program(place) for place in places],
        programs.inputs.example,
        programs.inputs.fits,
        [o.type for o in programs.entry.outputs],
        lambda number, letter: _trials(programs, places[number], letter),
    )


def _title(programs: EntryPrograms) -> str:
    return f"{programs.artifact.reader.root}: a member program of entry {programs.name}"


def _trials(programs: EntryPrograms, place: int, letter: str) -> RowTrials:
    """Returns the trials of a member's program. place: of the member among the loaded ones."""
    title, device = _title(programs), programs.artifact.device
    program, weights = programs.source.member(place)
    budget = programs.artifact.limits.budget
    if budget is not None:  # the file chooses the inputs, so they do not raise what a run may take
        budget = Budget(budget.bytes, budget.work, budget.limit, use="run")

    def runner(form: Program, raise_weight: Callable[[Any], Any]) -> Run:
        function = graph_module(form, device).forward

        def run(given: Sequence[torch.Tensor]) -> Sequence[object]:
            values = [*map(raise_weight, weights), *(x.to(device) for x in given)]
            if budget is not None:
                check_member_run(title, form, values, budget)
            with torch.inference_mode():
                found: Sequence[object] = function(*values)
            return [y.cpu() if isinstance(y, torch.Tensor) else y for y in found]

        return run

    entry = programs.entry
    sources = [programs.inputs.source(k) for k in range(len(entry.inputs))]
    types = [t for t in (tensor_type(o.type) for o in entry.outputs) if t is not None]
    most = budget.bytes if budget is not None else math.inf
    return RowTrials(
        runner(program, lambda w: w), runner(raised(program), raise_value), sources, types, letter, most
    )
