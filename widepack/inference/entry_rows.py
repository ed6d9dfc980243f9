"""Finds out whether the rows of an entry's batch are independent: as the artifact says, or by trials now."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from widepack_artifacts.rows import Rows

from ..errors import ArtifactError, LoweringError
from ..ir.cast import raised
from ..ir.float64 import raise_value
from ..ir.tensor_type import tensor_type
from ..rows.trials import RowTrials
from ..rows.verdict import ExaminedEntry
from ..runtime.admission import check_member_run, guarded
from ..runtime.budget import Budget
from ..runtime.graph_module import graph_module
from ..system import deadline
from .programs import EntryPrograms


def rows_of_entry(programs: EntryPrograms) -> Rows:
    """Returns what an artifact says about the rows of an entry.

    An artifact of a format before 1.2 says nothing. Then each member program is examined now.
    """
    if programs.entry.rows is not None:
        return programs.entry.rows
    if programs.examined_rows is None:
        entry = examined(programs)
        seconds = 60 + 0.5 * sum(len(p.nodes) for p in entry.programs)
        try:
            with guarded(_title(programs)), deadline.within(seconds):
                programs.examined_rows = entry.rows()
        except LoweringError as e:
            raise ArtifactError(f"{_title(programs)}: {e}") from e
    return programs.examined_rows


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
    title = _title(programs)
    program, weights = programs.source.member(place)
    device = programs.artifact.device
    exact, function = raised(program), graph_module(program, device).forward
    function64 = graph_module(exact, device).forward
    budget = programs.artifact.limits.budget
    if budget is not None:  # the file chooses the inputs, so they do not raise what a run may take
        budget = Budget(budget.bytes, budget.work, budget.limit, use="run")

    def run(given: Sequence[torch.Tensor]) -> Sequence[object]:
        moved = [x.to(device) for x in given]
        if budget is not None:
            check_member_run(title, program, [*weights, *moved], budget)
        with torch.inference_mode():
            found: Sequence[object] = function(*weights, *moved)
        return [y.cpu() if isinstance(y, torch.Tensor) else y for y in found]

    def run_float64(given: Sequence[torch.Tensor]) -> Sequence[object]:
        values = [*map(raise_value, weights), *(x.to(device) for x in given)]
        if budget is not None:
            check_member_run(title, exact, values, budget)
        with torch.inference_mode():
            found: Sequence[object] = function64(*values)
        return [y.cpu() if isinstance(y, torch.Tensor) else y for y in found]

    entry = programs.entry
    sources = [programs.inputs.source(k) for k in range(len(entry.inputs))]
    types = [t for t in (tensor_type(o.type) for o in entry.outputs) if t is not None]
    most = budget.bytes if budget is not None else math.inf
    return RowTrials(run, run_float64, sources, types, letter, most)
