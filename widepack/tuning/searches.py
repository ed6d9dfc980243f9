"""Prepares the searches of one pattern of an entry: one for each batch."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

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

CHECKED = (5, 1, 64)
"""The batches at which answers are compared with the members, if the probe alone does not decide."""
MEMBERS_S, MOST_MEMBERS_S = 2.0, 10.0
"""Processor seconds after which the members run at no further batch for that, and at none at all."""


@dataclass(frozen=True)
class Prepared:
    """What the searches of a pattern share. programs: the simplified member programs. lowered: the programs
    of plans, by plan.
    """

    programs: PatternPrograms
    lowered: dict[str, Lowered] = field(default_factory=dict)

    @classmethod
    def of(cls, entry: WideEntry, pattern: str) -> Prepared:
        """Prepares searches of one pattern of an entry."""
        return cls(_simplified(entry, pattern))


def searches_of(
    entry: WideEntry, pattern: str, batches: Sequence[int], options: SearchOptions, prepared: Prepared
) -> tuple[dict[int, Search], dict[int, str]]:
    """Prepares a search for each batch of a pattern. None of them is started.

    Args:
        entry: The entry of a loaded artifact.
        pattern: The pattern of inputs.
        batches: The batches to measure.
        options: Those of all batches.
        prepared: From `Prepared.of` for this entry and pattern.

    Returns:
        The searches by batch; for each batch that was refused, the reason.
    """
    programs = entry.programs
    letter = programs.inputs.letter
    sizes_of, refused = _sizes_of(entry, batches)
    bind, check = _binder(entry, pattern), MemberCheck(entry, pattern)
    searches: dict[int, Search] = {}
    bound: MutableMapping[tuple[int, str, int], Any] = WeakValueDictionary()
    for batch, sizes in sizes_of.items():
        inputs = programs.inputs.drawn(pattern, sizes)
        work = Workload(
            programs=prepared.programs,
            sizes=sizes,
            device=programs.artifact.device,
            inputs=inputs,
            lowered=prepared.lowered,
            bound=bound,
            plain=programs.source.plain,
        )
        label = f"{entry.name} {pattern} {letter} = {batch}" if letter else f"{entry.name} {pattern}"
        searches[batch] = Search(work, bind, AnswerCheck(check, inputs), options, label)
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


class MemberCheck:
    """Checks bound programs of one pattern against its members.

    A program must pass the artifact's probe, which has bounds for other devices too. `beyond` says whether it
    is within the bounds of the build, which are narrower.
    """

    def __init__(self, entry: WideEntry, pattern: str) -> None:
        self.entry, self.pattern = entry, pattern
        self._found: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
        self._calls: list[_CheckedCall] | None = None

    def beyond(self, bound: Any) -> str:
        """Returns where the answers exceed the bounds of the build; "" if they do not.

        The build's bound of a member's error is for its error over all calls of the verification. Over the
        few numbers of the probe alone, the error of a right program may be larger. Then other calls decide.
        Raises: VerificationError for an answer that the probe refuses.
        """
        if bound not in self._found:
            beyond = self.entry.programs.probe_check.run(self.pattern, [bound], again=True)
            self._found[bound] = self._over_calls(bound, beyond) if beyond else ""
        return self._found[bound]

    def _over_calls(self, bound: Any, beyond: str) -> str:
        """Returns where the answers of several calls exceed the bounds, or "". beyond: the probe's words."""
        if self._calls is None:
            self._calls = self._member_calls()
        if not self._calls:
            return beyond
        runs = self.entry.programs.probe_check.runs
        stats = runs.new_stats(self.pattern)
        for call in self._calls:
            found = bound.run(*call.given)
            members = self.entry.programs.artifact.members
            for place, (member, (own, truth)) in enumerate(zip(members, call.answers)):
                for k, output in enumerate(stats):
                    shared = bound.program.outputs[k].kind == "shared"
                    output.add_own(own[k], truth[k])
                    wide = found[k] if shared else found[k][place]
                    output.add_wide(member, call.label, wide, own[k], truth[k])
        if not runs.float64:
            for output in stats:
                output.widen()
        return next((words for output in stats if (words := output.wrong())), "")

    def _member_calls(self) -> list[_CheckedCall]:
        """Runs the members on drawn inputs of one batch, and of others as long as there is time.

        Returns [] if one batch takes too long.
        """
        programs, begin = self.entry.programs, time.thread_time()
        letter, calls = programs.inputs.letter, list[_CheckedCall]()
        for batch in CHECKED if letter else CHECKED[:1]:
            sizes = {**programs.inputs.example, **({letter: batch} if letter else {})}
            if _refusal(self.entry, sizes) or (calls and time.thread_time() - begin > MEMBERS_S):
                continue
            call = _CheckedCall(f"batch {batch}", programs.inputs.drawn(self.pattern, sizes), [])
            for place in range(len(programs.artifact.chosen)):
                if not calls and time.thread_time() - begin > MOST_MEMBERS_S:
                    return []
                call.answers.append(programs.probe_check.runs.answers_to(self.pattern, place, call.given))
            calls.append(call)
        return calls


@dataclass(frozen=True)
class _CheckedCall:
    """A call with the inputs of a wide program. answers: of each member, in its dtype and in float64."""

    label: str
    given: Sequence[torch.Tensor]
    answers: list[tuple[list[torch.Tensor], list[torch.Tensor]]]


class AnswerCheck:
    """Checks the answers of bound programs at the measured batch.

    They must be those of the first program that was checked: the predicted plan, which the build verified. If
    that is within the bounds of the build here, the others must be, too.
    """

    def __init__(self, check: MemberCheck, inputs: Sequence[torch.Tensor]) -> None:
        self.check, self.inputs = check, inputs
        self._first: Any = None
        self._first_within_bounds = False

    def __call__(self, bound: Any) -> str:
        """Returns why the answers are wrong, or ""."""
        try:
            beyond = self.check.beyond(bound)
        except VerificationError as e:
            return str(e)
        answers = bound.run(*self.inputs)
        if self._first is None:
            self._first, self._first_within_bounds = answers, not beyond
            return ""
        if self._first_within_bounds and beyond:
            return beyond
        return self.check.entry.programs.probe_check.differ(self.check.pattern, answers, self._first)


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
