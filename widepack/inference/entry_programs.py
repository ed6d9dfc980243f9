"""Keeps the wide programs of one entry of a loaded artifact: found, bound and checked when they are first
needed.

| part | file |
|---|---|
| finds or lowers a program | `programs/program_source.py` |
| checks it against the budget of the load | `programs/program_source.py` |
| binds it to weights and to a backend | `programs/program_binder.py` |
| checks its answers against the probe | `programs/probe_check.py` |
| makes inputs for these | `programs/entry_inputs.py` |
| runs it by graphs | `graphs/call_graphs.py` |

`int8_programs` makes the programs of a load with int8 weights: `load(weights="int8")`.

Calls of few rows read the weights, and little else takes time; int8 weights are a quarter of the bytes. Calls
of many rows multiply, and there float32 is faster. So programs over int8 weights serve batches up to `ROWS`
rows of a member, on average over the layers. Larger batches run the artifact's own programs, which are bound
when a call first needs one. A layer keeps its float weights if those of all members are fewer than `LEAST`
numbers. Both limits were measured on one CPU (AMD EPYC, one thread).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from widepack_artifacts.entry import Rows

from ..backends import backend
from ..errors import ProbeError, WidepackError
from ..planning.plan import NodeChoice, for_size, scaled
from ..runtime.admission import guarded
from ..spec.entries import PATTERNS
from ..system.autocast import plain_modes
from .binder import Binder
from .graph_pool import GraphUse
from .graphs.call_graphs import CallGraphs
from .open_artifact import OpenArtifact
from .programs.bound_program import BoundProgram, StoredProgram, within
from .programs.entry_inputs import EntryInputs
from .programs.merged_weights import MOST, SPLIT, has_memory, merged_bytes
from .programs.probe_check import ProbeCheck
from .programs.program_binder import ProgramBinder
from .programs.program_source import ProgramAdmission, ProgramSource

ROWS = 4
LEAST = 1 << 18
_LOWERED_AS = ("bmm",)
"""The strategy of linear layers whose nodes `Int8Program` replaces."""
_BECAUSE = "int8 weights are a quarter of the bytes of float32"


def int8_programs(source: ProgramSource, pattern: str) -> list[StoredProgram]:
    """Returns the programs over int8 weights, one for each batch class, smallest batch first.

    There are none if no linear layer has enough weights, or if one row of the batch is more than `ROWS` rows.
    Raises: LoweringError; UsageError.
    """
    from ..lowering.int8_weights import Int8Program  # imports the registry of ops

    inputs, found = source.inputs, list[StoredProgram]()
    for program, plan in source.lower(pattern, _LOWERED_AS):
        made = Int8Program(program, LEAST)
        if not made.layers:
            continue
        rows = made.largest_batch(inputs.example, inputs.letter, ROWS)
        least, most = plan.batch
        most = rows if most is None or (rows is not None and rows < most) else most
        if most is not None and most < least:
            continue
        choices = {**plan.choices, **{n: NodeChoice("int8", _BECAUSE, True) for n in made.layers}}
        plan = replace(plan, batch=(least, most), choices=choices)
        found.append(StoredProgram(made.program, plan, int8=True))
    return found


def above(programs: Sequence[StoredProgram], small: Sequence[StoredProgram]) -> list[StoredProgram]:
    """Returns programs for the batches above those that others serve. small: the others."""
    if not small:
        return list(programs)
    limits = [s.plan.batch[1] for s in small]
    if None in limits:
        return []
    largest = max(most for most in limits if most is not None)
    return within(programs, (largest + 1, None))


class _DeferredClass(NamedTuple):
    """The programs of one batch class, and the bytes of the weights that they merge."""

    rows: list[StoredProgram]
    bytes: int


class EntryPrograms:
    """The wide programs of an entry, once for each pattern and batch class.

    Attributes:
        artifact: The open artifact.
        name: The entry's name.
        entry: What the manifest says of it.
        inputs: Makes inputs of its calls.
        source: Finds its programs.
        binder: Binds them.
        probe_check: Checks them.
        examined_rows: What was found about the rows of a batch, where the manifest says nothing.
    """

    def __init__(self, artifact: OpenArtifact, name: str, binder: Binder) -> None:
        self.artifact, self.name = artifact, name
        self.inputs = EntryInputs(artifact, name, binder)
        self.entry = self.inputs.entry
        admission = ProgramAdmission(self.inputs)
        self.source = ProgramSource(self.inputs, admission)
        self.probe_check = ProbeCheck(self.inputs)
        self.binder = ProgramBinder(self.inputs, admission, self.probe_check)
        self.examined_rows: Rows | None = None
        self._bound: dict[str, list[BoundProgram]] = {}
        self._deferred: dict[str, list[_DeferredClass]] = {}

    def for_sizes(self, pattern: str, sizes: Mapping[str, int]) -> BoundProgram:
        """Returns the program that a call of these sizes runs. A deferred one is bound."""
        bound = self.of(pattern)
        if self._deferred.get(pattern):
            size = scaled(sizes, self.inputs.letter, self.inputs.example)
            if not any(b.plan.fits(size) for b in bound):
                bound = self._with_deferred(pattern, size)
        if len(bound) == 1:
            return bound[0]
        return for_size(bound, scaled(sizes, self.inputs.letter, self.inputs.example), lambda b: b.plan)

    def _with_deferred(self, pattern: str, size: int | None) -> list[BoundProgram]:
        """Binds the deferred program for a batch if there is memory for it. Returns all bound programs.

        Without the memory the program for fewer rows runs, from now on.
        """
        with self.artifact.lock, plain_modes():
            waiting = self._deferred[pattern]
            for one in [w for w in waiting if w.rows[0].plan.fits(size)]:
                waiting.remove(one)
                if not has_memory(self.artifact, one.bytes):
                    continue
                self.artifact.limits.begin()
                with guarded(self.inputs.title(pattern), self.probe_check.explain):
                    bound = self._bind_class(pattern, one.rows)
                rows = [*self._bound[pattern], bound]
                self._bound[pattern] = sorted(rows, key=lambda b: b.plan.batch[0])
            return self._bound[pattern]

    @property
    def description(self) -> str:
        """Where the programs of pattern `shared` run: `cpu, aot`. Nothing is bound for it."""
        bound = self._bound.get("shared")
        names = dict.fromkeys(b.backend for b in bound) if bound else [self.artifact.options.backend]
        graphs = "" if self.artifact.graphs is None else ", CUDA graphs"
        return f"{self.artifact.device}, {'+'.join(names)}{graphs}"

    def graph_use(self, pattern: str) -> list[GraphUse]:
        """Returns which calls of a pattern run by graphs, for each batch class. It binds the programs."""
        reason = f"the model was loaded without graphs on {self.artifact.device}"
        return [
            b.graphs.use if b.graphs is not None else GraphUse(pattern, b.plan.batch, why_not=reason)
            for b in self.of(pattern)
        ]

    def bound(self) -> list[tuple[str, BoundProgram]]:
        """Returns the bound programs with their patterns."""
        with self.artifact.lock:
            return [(pattern, b) for pattern, rows in self._bound.items() for b in rows]

    def forget(self) -> None:
        """Forgets the bound programs, and drops their graphs."""
        for _, bound in self.bound():
            if bound.graphs is not None:
                bound.graphs.forget()
        self._bound.clear()
        self._deferred.clear()

    def of(self, pattern: str) -> list[BoundProgram]:
        """Returns the bound programs of a pattern. They are found, bound and checked on first use."""
        with self.artifact.lock:
            self.artifact.check_open()
            if pattern not in self._bound:
                self.artifact.limits.begin()
                with plain_modes():
                    self._bound[pattern] = self._bind_pattern(pattern)
                self.release_weights()
            return self._bound[pattern]

    def release_weights(self) -> None:
        """Takes the mapped weights out of memory if all bound programs have copies of them."""
        bound = [b for rows in self._bound.values() for b in rows]
        if self.artifact.device.type == "cpu" and all(backend(b.backend).COPIES for b in bound):
            self.artifact.weights.release()

    def _bind_pattern(self, pattern: str) -> list[BoundProgram]:
        """Binds the measured programs of a pattern, or the artifact's if those fail."""
        if self.artifact.options.int8:
            with guarded(self.inputs.title(pattern), self.probe_check.explain):
                small = int8_programs(self.source, pattern)
                return self._bind_classes(pattern, [*small, *above(self.source.wide(pattern), small)])
        measured = self.source.measured(pattern)
        try:
            with guarded(self.inputs.title(pattern), self.probe_check.explain):
                return self._bind_classes(pattern, measured or self.source.wide(pattern))
        except (WidepackError, RuntimeError) as e:
            if not measured:
                if others := self.source.predicted_elsewhere(pattern):
                    return self._bind_classes(pattern, others)
                raise
            why = str(e).splitlines()[0] if str(e) else type(e).__name__
            warnings.warn(
                f"the plan that was measured here is not used ({why}); measure it again: widepack tune",
                stacklevel=5,
            )
            return self._bind_classes(pattern, self.source.wide(pattern))

    def _bind_classes(self, pattern: str, programs: Sequence[StoredProgram]) -> list[BoundProgram]:
        """Binds and checks one program for each batch class."""
        classes: dict[tuple[int, int | None], list[StoredProgram]] = {}
        for program in programs:
            classes.setdefault(program.plan.batch, []).append(program)
        now: list[_DeferredClass] = []
        later: list[_DeferredClass] = []
        few = any(program.int8 for program in programs)  # then others are for batches that may never come
        for rows in classes.values():
            size = max(merged_bytes(self.artifact, row.program) for row in rows)
            (later if size or (few and not rows[0].int8) else now).append(_DeferredClass(rows, size))
        if later and (not now or self.artifact.options.memory == MOST):
            now, later = [*now, *self._merging_now(pattern, later, bool(now))], []
        self._deferred[pattern] = later
        in_order = sorted(now, key=lambda one: one.rows[0].plan.batch[0])
        return [self._bind_class(pattern, one.rows) for one in in_order]

    def _merging_now(
        self, pattern: str, classes: Sequence[_DeferredClass], optional: bool
    ) -> Sequence[_DeferredClass]:
        """Returns the programs that are bound now although they merge weights.

        classes: those that merge. optional: whether other programs can run without them. Without the memory
        it returns none of them if they are optional, and else programs that merge as little as possible.
        """
        if not has_memory(self.artifact, sum(one.bytes for one in classes)):
            if optional:
                return []
            classes = [
                _DeferredClass([one], merged_bytes(self.artifact, one.program))
                for one in self._without_merging(pattern)
            ]
        return classes

    def _without_merging(self, pattern: str) -> list[StoredProgram]:
        """Returns programs that merge no weights: the artifact's, or else lowered now.

        Ops that cannot run over factors, for example recurrent ones, read merged weights in these too.
        """
        rules = [s for s in self.source.not_measured(pattern) if not merged_bytes(self.artifact, s.program)]
        return rules or [StoredProgram(program, plan) for program, plan in self.source.lower(pattern, SPLIT)]

    def _bind_class(self, pattern: str, rows: Sequence[StoredProgram]) -> BoundProgram:
        """Binds and checks the program of a batch class. Its calls may run by graphs from now on."""
        bound = self._bind_program(pattern, rows)
        if self.artifact.graphs is not None:
            bounds = self.probe_check.widest_bounds(pattern) if self.artifact.options.verified else []
            bound.use_graphs(CallGraphs(self.artifact.graphs, bound, self.inputs, pattern, bounds))
        return bound

    def _bind_program(self, pattern: str, rows: Sequence[StoredProgram]) -> BoundProgram:
        """Binds the program for the requested backend, or the first one if no backend is requested.

        If its backend is not available or wrong, the program for `eager` is bound.
        """
        options = self.artifact.options
        named = options.backend
        program = next((w for w in rows if (w.plan.backend or "eager") == named), rows[0])
        fallback = next((w for w in rows if not w.plan.backend), program)
        bound = self.binder.bind(pattern, program, fallback=fallback)
        if not options.verified or pattern not in PATTERNS:
            return bound
        bound = self._checked(pattern, bound, fallback)
        if options.compile and bound.place is not None and not bound.plan.backend:
            eager = self.binder.bind(pattern, fallback, replace(options, backend="eager"))
            inputs = self.inputs.drawn(pattern, self.inputs.sizes_of(bound.plan))
            self.binder.choice.measure(pattern, fallback, bound, eager, inputs)
        return bound

    def _checked(self, pattern: str, bound: BoundProgram, fallback: StoredProgram) -> BoundProgram:
        """Returns a bound program that passes the probe, on `eager` if the plan's backend does not."""
        options = self.artifact.options
        named = options.backend
        try:
            self.probe_check.run(pattern, [bound])
        except ProbeError as e:
            if named != "auto" or bound.backend == "eager":
                raise
            warnings.warn(
                f"backend {bound.backend!r}, which the plan names, gives wrong answers here ({e}): "
                "'eager' runs instead",
                stacklevel=7,
            )
            bound = self.binder.bind(pattern, fallback, replace(options, backend="eager"))
            self.probe_check.run(pattern, [bound])
        return bound
