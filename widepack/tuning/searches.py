"""Prepares the searches of one pattern of an entry: one for each batch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from widepack_artifacts import guards as guard_forms
from widepack_artifacts.program import Kind, Program

from ..errors import VerificationError
from ..inference.entry import WideEntry
from ..inference.programs.bound_program import StoredProgram
from ..lowering.lower import Lowered
from ..lowering.pattern_programs import PatternPrograms, simplified
from ..planning.plan import Plan
from .candidate_pool import COMPILED, Workload
from .search import Search, SearchOptions

S = TypeVar("S", bound=Search)


def searches_of(
    kind: type[S], entry: WideEntry, pattern: str, batches: Sequence[int], options: SearchOptions
) -> tuple[dict[int, S], dict[int, str]]:
    """Prepares a search of a class for each batch of a pattern. None of them is started.

    Args:
        kind: The class of the searches.
        entry: The entry of a loaded artifact.
        pattern: The pattern of inputs.
        batches: The batches to measure.
        options: Those of all batches.

    Returns:
        The searches by batch; for each batch that was refused, the reason.
    """
    programs = entry.programs
    letter = programs.inputs.letter
    sizes_of, refused = _sizes_of(entry, batches)
    simple = _simplified(entry, pattern)
    bind = _binder(entry, pattern)
    searches: dict[int, S] = {}
    lowered: dict[str, Lowered] = {}
    for batch, sizes in sizes_of.items():
        inputs = programs.inputs.drawn(pattern, sizes)
        work = Workload(
            programs=simple,
            sizes=sizes,
            device=programs.artifact.device,
            inputs=inputs,
            lowered=lowered,
            plain=programs.source.plain,
        )
        label = f"{entry.name} {pattern} {letter} = {batch}" if letter else f"{entry.name} {pattern}"
        searches[batch] = kind(work, bind, AnswerCheck(entry, pattern, inputs), options, label)
    for batch, classes in batch_classes({b: s.scaled for b, s in searches.items()}).items():
        searches[batch].classes = classes
    return searches, refused


def _sizes_of(entry: WideEntry, batches: Sequence[int]) -> tuple[dict[int, dict[str, int]], dict[int, str]]:
    """Returns the sizes of all dims for each batch; for each batch that the entry does not accept, the
    reason.
    """
    letter, example = entry.programs.inputs.letter, entry.programs.inputs.example
    sizes_of: dict[int, dict[str, int]] = {}
    refused: dict[int, str] = {}
    for batch in batches if letter else (1,):
        sizes = {**example, letter: batch} if letter else {**example}
        if why := _refusal(entry, sizes):
            refused[batch] = why
        else:
            sizes_of[batch] = sizes
    return sizes_of, refused


def _simplified(entry: WideEntry, pattern: str) -> PatternPrograms:
    """Returns the member programs, simplified for a pattern."""
    programs = entry.programs
    reader, manifest = programs.artifact.reader, programs.artifact.manifest
    weights: dict[str, Kind] = {w.name: w.kind for w in manifest.weights}  # type: ignore[misc]
    stacked = programs.inputs.per_member(pattern)
    members = [reader.program(f) for f in entry.entry.member]
    factors = programs.artifact.factors
    letter, example = programs.inputs.letter, programs.inputs.example
    return simplified(
        members, entry.entry.signatures, weights, stacked, example, letter, pattern, factors=factors
    )


def _binder(entry: WideEntry, pattern: str) -> Callable[[Program, Plan], Any]:
    """Returns a function that makes a wide program runnable on the backend of its plan."""
    programs = entry.programs
    given = replace(programs.artifact.options, compile=True, progress=None, most_nodes=COMPILED)

    def bind(program: Program, plan: Plan) -> Any:
        options = replace(given, backend=plan.backend or "eager")
        return programs.binder.bind(pattern, StoredProgram(program, plan), options)

    return bind


class AnswerCheck:
    """Checks the answers of bound programs at the measured batch.

    A program must pass the artifact's probe. Its answers must be those of the first program that was checked:
    the plan by rules of thumb, which the build verified. The probe has bounds for other devices too. So if
    the first program is within the bounds of the build here, the others must be, too.
    """

    def __init__(self, entry: WideEntry, pattern: str, inputs: Sequence[torch.Tensor]) -> None:
        self.entry, self.pattern, self.inputs = entry, pattern, inputs
        self._first: Any = None
        self._first_within_bounds = False

    def __call__(self, bound: Any) -> str:
        """Returns why the answers are wrong, or ""."""
        try:
            beyond = self.entry.programs.probe_check.run(self.pattern, [bound], again=True)
        except VerificationError as e:
            return str(e)
        answers = bound.run(*self.inputs)
        if self._first is None:
            self._first, self._first_within_bounds = answers, not beyond
            return ""
        if self._first_within_bounds and beyond:
            return beyond
        return self.entry.programs.probe_check.differ(self.pattern, answers, self._first)


def _refusal(entry: WideEntry, sizes: Mapping[str, int]) -> str:
    """Returns why the entry does not accept these sizes; empty if it does."""
    for d, n in sizes.items():
        dim = entry.entry.dims[d]
        if n < dim.min or (dim.max is not None and n > dim.max):
            most = f" <= {dim.max}" if dim.max is not None else ""
            return f"{d} = {n}; the model is valid for {dim.min} <= {d}{most}"
    broken = next((g for g in entry.entry.guards if not guard_forms.holds(g.expr, sizes)), None)
    return f"the model is valid where {guard_forms.text(broken.expr)}" if broken else ""


def batch_classes(sizes: Mapping[int, int]) -> dict[int, tuple[int, int | None]]:
    """Returns the batch class of each measured batch.

    Two classes meet at the geometric mean of their batches.

    `sizes` has for each batch its size, counted at the example sizes of the other dims.
    """
    order = sorted(sizes, key=lambda b: sizes[b])
    ends: list[int | None] = [math.isqrt(sizes[a] * sizes[b]) for a, b in itertools.pairwise(order)]
    starts = [1, *[e + 1 for e in ends if e is not None]]
    return {b: (start, end) for b, start, end in zip(order, starts, [*ends, None])}
