"""`Programs`: the wide programs of one entry of a loaded artifact, found, bound and held to the artifact's probe.

A wide program is lowered, bound to the weights and split from its prologue when it is first needed, once for each pattern and batch class.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from widepack_artifacts import guards as guard_forms
from widepack_artifacts import strict_json
from widepack_artifacts.manifest import Entry
from widepack_artifacts.program import Kind, Program
from widepack_artifacts.tree import Tree

from .. import backends
from ..planning import plan_cache
from ..verification import probe as probes
from ..runtime.admission import admit, check_outputs, check_slots, guarded
from ..spec.entries import PATTERNS
from ..errors import ArtifactError, LoweringError, ProbeError, UsageError, WidepackError
from .open_artifact import Held, Running
from .binder import Binder
from ..system.machine import name_of
from ..kernels.packed import decompose
from ..system.deadline import Lowering
from ..planning.plan import Plan, for_size, nearest_threads, scaled
from .probe_check import Probing
from ..ir.at_rest import draws
from ..runtime.graph_module import Executable, Function
from ..runtime.walk import META, Budget, NeedsValues, Walk


@dataclass(frozen=True)
class Wide:
    """A wide program. content: the SHA-256 of its file; empty where it was lowered here."""

    program: Program
    plan: Plan
    content: str = ""


@dataclass(frozen=True)
class Took:
    """What a walk found that a program takes, as it is noted in the user's cache. work: nanoseconds of one core. bytes: live at one time."""

    work: float
    bytes: float

    def write(self) -> str:
        return f"{self.work!r} {self.bytes!r}"

    @classmethod
    def read(cls, text: str) -> Took | None:
        """None for what is no note of a walk."""
        try:
            work, size = map(float, text.split())
        except ValueError:
            return None
        return cls(work, size) if 0 <= work < math.inf and 0 <= size < math.inf else None


class Bound:
    """A wide program ready to run. batch: the sizes of the first dim that it is for. only: the number of the output that is the whole answer as it is, or -1.

    backend: what runs it. content: the SHA-256 of the program's file; empty where it is in none of the artifact.
    """

    def __init__(self, program: Program, plan: Plan, run: Executable, result: Tree, backend: str = "eager", content: str = "") -> None:
        self.program = program
        self.content = content
        self.plan = plan
        self.backend = backend
        self.become(run)
        alone = result.get("leaf", -1)
        self.only = alone if alone >= 0 and program.outputs[alone].kind != "shared" else -1

    def become(self, run: Executable) -> None:
        """Run this from now on."""
        self.executable = run
        self.run = run.run

    @property
    def place(self) -> Path | None:
        """The folder of the compiled program that runs; None where none does."""
        return getattr(self.executable.call, "place", None)


class Programs:
    """The wide programs of an entry. held: the open artifact. name: the entry's. entry: what the manifest says of it. binder: of its inputs. letter: the dim that
    batch classes are made of, or ""."""

    def __init__(self, held: Held, name: str, binder: Binder) -> None:
        self.held, self.name, self.binder = held, name, binder
        self.entry: Entry = held.entry(name)
        self.table = {w.name: w for w in held.manifest.weights}
        self.example = {d: dim.example for d, dim in self.entry.dims.items()}
        self.letter = next((d.letter for leaf in binder.leaves for d in leaf.dims if not isinstance(d, int)), "")
        self.probing = Probing(held, name, self.entry, binder)
        self._bound: dict[str, list[Bound]] = {}

    def initial(self) -> dict[int, torch.Tensor]:
        """The states that begin as weights, `[N, ...]`, by the number of their input."""
        return self.probing.initial()

    def for_sizes(self, pattern: str, sizes: Mapping[str, int]) -> Bound:
        """The program that a call of these sizes runs."""
        bound = self.of(pattern)
        if len(bound) == 1:
            return bound[0]
        return for_size(bound, scaled(sizes, self.letter, self.example), lambda b: b.plan)

    @property
    def plain(self) -> bool:
        """Whether the artifact's own plans have no packed convolutions, since with them answers were not right."""
        return any(w.plan.get("plain") for w in self.entry.wide)

    @property
    def running(self) -> str:
        """`cpu, aot`: where the programs of pattern `shared` run; binds nothing."""
        bound = self._bound.get("shared")
        found = "+".join(dict.fromkeys(b.backend for b in bound)) if bound else self.held.running.backend
        return f"{self.held.device}, {found}"

    def member(self, i: int) -> tuple[Program, list[Any]]:
        """A loaded member's own program, by the member's place among the loaded ones, and a value for each of its weights."""
        number = self.held.chosen[i]
        program = self.held.program(self.entry.member[self.entry.signatures[number]], self.name)
        return program, [self.held.own(s.source, i) for s in program.weights]

    def bound(self) -> list[tuple[str, Bound]]:
        """What is bound, with its pattern."""
        with self.held.lock:
            return [(pattern, b) for pattern, rows in self._bound.items() for b in rows]

    def anew(self, pattern: str, bound: Bound, weights: Mapping[str, Any]) -> Executable:
        """A bound program on the same backend over other weights, which are given by name."""
        running = replace(self.held.running, backend=bound.backend)
        return self.bind(pattern, Wide(bound.program, bound.plan, bound.content), running, weights=weights).executable

    def forget(self) -> None:
        """Let go of bound programs."""
        self._bound.clear()

    def of(self, pattern: str) -> list[Bound]:
        """The bound programs of a pattern; made, probed and kept on first use."""
        with self.held.lock:
            self.held.must_be_open()
            if pattern not in self._bound:
                if not self.held.loading:  # what one load binds has one budget, and so has what one call does
                    self.held.budget, self.held.lowering = self.held.fresh_budget(), Lowering(self.held.limit)
                kept = self.kept(pattern)
                try:
                    with guarded(self.probing.said(pattern), self._in_dtype):
                        self._bound[pattern] = self._ready(pattern, kept or self.wide(pattern))
                except (WidepackError, RuntimeError) as e:
                    if not kept:
                        raise
                    warnings.warn(
                        f"the plan that was measured here is not used ({str(e).splitlines()[0] if str(e) else type(e).__name__}); measure it again: widepack tune",
                        stacklevel=4,
                    )
                    self._bound[pattern] = self._ready(pattern, self.wide(pattern))
            return self._bound[pattern]

    def _in_dtype(self, error: Exception) -> WidepackError | None:
        """What torch says where another dtype was asked for than the artifact's: that is not the file's fault."""
        if self.held.cast is None or not isinstance(error, RuntimeError):
            return None
        return self.probing.in_dtype(error)

    def _ready(self, pattern: str, wides: Sequence[Wide]) -> list[Bound]:
        """Wide programs, bound and probed: one a batch class."""
        classes: dict[tuple[int, int | None], list[Wide]] = {}
        for wide in wides:
            classes.setdefault(wide.plan.batch, []).append(wide)
        return [self._one(pattern, rows) for rows in classes.values()]

    def _one(self, pattern: str, rows: Sequence[Wide]) -> Bound:
        """Of one batch class: the program for the backend that was asked for; without one the first, and where its backend is not there or wrong, the one for `eager`."""
        named = self.held.running.backend
        wide = next((w for w in rows if (w.plan.backend or "eager") == named), rows[0])
        otherwise = next((w for w in rows if not w.plan.backend), wide)
        bound = self.bind(pattern, wide, otherwise=otherwise)
        if not self.held.verified or pattern not in PATTERNS:
            return bound
        try:
            self.probe(pattern, [bound])
        except ProbeError as e:
            if named != "auto" or bound.backend == "eager":
                raise
            warnings.warn(f"backend {bound.backend!r}, which the plan names, answers wrongly here ({e}): 'eager' runs instead", stacklevel=6)
            bound = self.bind(pattern, otherwise, replace(self.held.running, backend="eager"))
            self.probe(pattern, [bound])
        return bound

    def planned(self, pattern: str) -> list[Wide]:
        """What there is to run a pattern, of each batch class the best first; binds nothing."""
        return self.kept(pattern) or self.wide(pattern)

    def kept(self, pattern: str) -> list[Wide]:
        """The wide programs that were measured on this machine and kept in the user's cache."""
        held = self.held
        if held.strategies is not None or not held.whole or held.cast is not None:
            return []
        return [Wide(program, plan) for program, plan in plan_cache.find(held.manifest.digest, self.name, pattern, str(held.device))]

    def wide(self, pattern: str) -> list[Wide]:
        """The wide programs of a pattern: the artifact's that were measured on this machine, its other ones, else lowered here."""
        held = self.held
        if held.strategies is None and held.whole and held.cast is None:
            every = [w for w in self.entry.wide if w.pattern == pattern and w.device == held.device.type]
            here = name_of(str(held.device)) if any("machine" in w.plan for w in every) else ""
            plans = [(w, Plan.from_json(w.plan)) for w in every if w.plan.get("machine", "") in ("", here)]
            measured = nearest_threads([((w, p), p.threads) for w, p in plans if p.machine]) if here else []
            rows = measured or [(w, p) for w, p in plans if not p.machine]
            files = held.manifest.files
            made = [Wide(held.reader.program(w.file), plan, files[w.file].sha256) for w, plan in rows]
            if made:
                return made
        try:
            return [Wide(program, plan) for program, plan in self.lower(pattern)]
        except (LoweringError, UsageError) as e:
            if held.strategies is not None or not held.whole or pattern not in PATTERNS:
                raise
            raise ArtifactError(f"{self.probing.said(pattern)} is not in the artifact, and cannot be made here: {e}") from e

    def letters(self, pattern: str) -> str:
        """For each input `s` or `e`: one for all members, or one each."""
        return self.probing.letters(pattern)

    def lower(self, pattern: str) -> list[tuple[Program, Plan]]:
        from ..lowering.relower import relower  # the rules are imported only when something has to be lowered

        programs = [self.held.program(f, self.name) for f in self.entry.member]
        signatures = [self.entry.signatures[i] for i in self.held.chosen]
        own = self.probing.own(pattern)
        kinds: dict[str, Kind] = {w.name: w.kind for w in self.held.manifest.weights}  # type: ignore[misc]
        sizes = dict(self.example)
        held = self.held
        self._readable(pattern, programs, signatures)
        same = (tuple(self.entry.member), tuple(own), tuple(sizes.items()), self.letter, pattern, self.plain, tuple(signatures))
        if same not in held.lowering.made:  # entries over the same files and kinds of inputs are lowered once
            with held.lowering.within(self.entry.member, [len(p.nodes) for p in programs]):
                held.lowering.made[same] = relower(
                    programs,
                    signatures,
                    kinds,
                    own,
                    sizes,
                    self.letter,
                    held.device.type,
                    pattern,
                    held.strategies or "auto",
                    held.simplify,
                    self.plain,
                )
        found: list[tuple[Program, Plan]] = held.lowering.made[same]
        return found

    def _readable(self, pattern: str, programs: Sequence[Program], signatures: Sequence[int]) -> None:
        """Hold member programs to the budget at the example's sizes, before sizes become expressions. Raises: ArtifactError."""
        budget, held = self.held.budget, self.held
        if budget is None:
            return
        for k in sorted(set(signatures)):
            said = f"{held.reader.root}: the member program {k} of entry {self.name}"
            number = held.chosen[signatures.index(k)]
            held.justify(s.source for s in programs[k].weights)
            weights = [held.part(s.source, number) for s in programs[k].weights]
            walk = Walk(replace(budget), said, held.device)
            with contextlib.suppress(NeedsValues):  # its results are of sizes that no one knows, here and in lowering
                walk.run(programs[k], [*weights, *self._metas("shared", budget, 0)])

    def bind(
        self, pattern: str, wide: Wide, running: Running | None = None, otherwise: Wide | None = None, weights: Mapping[str, Any] | None = None
    ) -> Bound:
        """A wide program made ready to run. otherwise: what runs on `eager` where the plan's own backend is not there; the same program without it.

        weights: by name, where they are not those that the model holds.
        """
        program, held = wide.program, self.held
        running = running or held.running
        check_slots(self.probing.said(pattern), program, self.entry, self.table, len(held.chosen))
        if weights is None:
            weights = {s.source: held.weight(s.source) for s in program.weights}
        name, planned = running.backend, wide.plan.backend
        chosen = (planned if planned in backends.NAMES else "eager") if name == "auto" else name
        run: Executable | None = None
        if chosen != "eager" and draws(program):
            if name != "auto":
                raise UsageError(
                    f"{self.probing.said(pattern)} draws random numbers, and backend {name!r} is held to answers, of which each call has others: leave the backend out, which takes 'eager'"
                )
            chosen = "eager"
        if chosen != "eager":
            program = decompose(program)  # packed weights are oneDNN's: no compiler takes them
            self._admit(pattern, program, weights, f"{wide.content} decomposed" if wide.content else "")
            run = held.keeping(Executable(program, weights, held.device, prologue=held.prologue), weights)
            try:
                run.use(backends.backend(chosen).bind(self._task(pattern, wide, run, running)))
            except (backends.Unavailable, ArtifactError, UsageError) as e:
                if name != "auto":
                    raise
                warnings.warn(f"backend {chosen!r}, which the plan was measured to run best on, is not taken, and 'eager' runs: {e}", stacklevel=7)
                return self.bind(pattern, otherwise or wide, replace(running, backend="eager"))
        at_once = min(wide.plan.workers, torch.get_num_threads())
        if run is None:
            self._admit(pattern, program, weights, wide.content)
            run = held.keeping(Executable(program, weights, held.device, prologue=held.prologue, workers=at_once), weights)
        return Bound(program, wide.plan, run, self.entry.result, chosen, wide.content)

    def _admit(self, pattern: str, program: Program, weights: Mapping[str, Any], content: str) -> None:
        """Hold a program to the load's budget, unless it passed here before. content: what stands for the program; empty for its digest. Raises: ArtifactError."""
        held, budget = self.held, self.held.budget
        if budget is None:
            return
        at = f"{self.name} {pattern} {content or strict_json.digest(program.to_json())} {held.chosen}"
        key = probes.cache_key(held.manifest.digest, at, str(held.device), str(held.prologue), str(held.limit))
        said = self.probing.said(pattern)
        held.justify(s.source for s in program.weights)
        if (
            took := Took.read(probes.noted(key, "walks"))
        ) is not None:  # alone it passed: its share of what all programs of a load may take is counted
            budget.spent += took.work
            budget.admit(said, budget.spent, budget.held + took.bytes)
            return
        before = budget.spent
        outputs, peak = admit(budget, said, program, weights, lambda values: self._example(pattern, values, budget), held.device, held.prologue)
        check_outputs(said, program, outputs, self.entry, len(held.chosen))
        probes.remember(key, "walks", Took(budget.spent - before, peak).write())

    def _example(self, pattern: str, values: bool, budget: Budget) -> list[Any]:
        """Inputs of a call: the probe's, else of the example's sizes; those on meta unless values are asked for."""
        if self.held.verified and pattern in PATTERNS and self.held.probe is not None:
            return self.probing.inputs(pattern)
        made = self._metas(pattern, budget, len(self.held.chosen))
        return self.probing.drawn(pattern, self.example) if values else made

    def _metas(self, pattern: str, budget: Budget, members: int) -> list[torch.Tensor]:
        """Inputs of the example's sizes, on meta. members: 0 for one member's own. Raises: ArtifactError for more than the budget holds."""
        letters, made = self.letters(pattern), []
        for k, leaf in enumerate(self.binder.leaves):
            own = [d if isinstance(d, int) else d.factor * self.example[d.letter] for d in leaf.dims]
            many = members and (letters[k] == "e" or k in self.binder.carried)
            made.append(torch.empty([members, *own] if many else own, dtype=leaf.dtype, device=META))
        taken = sum(x.numel() * x.element_size() for x in made)
        if taken > budget.bytes:
            raise ArtifactError(
                f"{self.probing.said(pattern)}: its example inputs would take {taken:,} bytes, and this artifact may take {budget.bytes:,.0f}"
            )
        return made

    def _task(self, pattern: str, wide: Wide, run: Executable, running: Running) -> backends.Task:
        """A wide program as backends take it."""
        held, plan = self.held, wide.plan
        classes = "" if plan.batch == (1, None) else f", batch {plan.batch[0]} to {'any' if plan.batch[1] is None else plan.batch[1]}"
        return backends.Task(
            program=run.main,
            weights=run.given,
            device=held.device,
            content=strict_json.digest(run.main.to_json()),  # of what is compiled: the prologue may have taken a part of the program
            pattern=pattern,
            said=f"{self.probing.said(pattern)}{classes}",
            eager=run.eager,
            dims={d: (v.min, v.max, v.example) for d, v in self.entry.dims.items()},
            example=self.sizes_of(plan),
            guards=[g.expr for g in self.entry.guards],
            inputs=lambda sizes: self.probing.drawn(pattern, sizes),
            differ=lambda found, wanted: self.differ(pattern, wide.program, found, wanted),
            compile=running.compile,
            cache=running.cache,
            located=held.located,
            progress=running.progress,
            workers=min(plan.workers, torch.get_num_threads()),
            most_nodes=running.most_nodes,
        )

    def sizes_of(self, plan: Plan) -> dict[str, int]:
        """Sizes in the middle of a plan's batch class, or as it was measured, at least 2."""
        sizes = {d: max(2, v.example) for d, v in self.entry.dims.items()}
        if self.letter in sizes:
            least, most = plan.batch
            dim = self.entry.dims[self.letter]
            wanted = max(2, plan.at or max(least, min(sizes[self.letter], most or sizes[self.letter])))
            tried = {**sizes, self.letter: min(wanted, dim.max or wanted)}
            if all(guard_forms.holds(g.expr, tried) for g in self.entry.guards):
                return tried
        return sizes

    def differ(self, pattern: str, program: Program, found: Sequence[Any], wanted: Sequence[Any]) -> str:
        """Where a compiled program's outputs differ from the flat graph's by more than the probe's bounds, in words; empty where they do not."""
        record = self.probing.record(pattern) or self.probing.record("shared") or []
        for k, (mine, right) in enumerate(zip(found, wanted)):
            row = record[k] if k < len(record) else {}
            for a, b in zip(mine, right) if isinstance(right, list) else [(mine, right)]:
                if words := probes.differs(a, b, row):
                    return f"output {self.entry.outputs[k].name or k} {words}"
        return ""

    def _at_rest(self, bound: Bound) -> Function:
        """What runs a bound program; of one that draws random numbers, the program without."""
        if not draws(bound.program):
            return bound.run
        weights = {s.source: self.held.weight(s.source) for s in bound.program.weights}
        return Executable(self.probing.at_rest(bound.program), weights, self.held.device, prologue=self.held.prologue).run

    def probe(self, pattern: str, made: Sequence[Bound], again: bool = False) -> str:
        """Run the artifact's probe through each program that has not passed it here; again: through all.

        Returns: how the first of them that does leaves the bounds of the build, which are narrower, in words. Raises: ProbeError; ArtifactError.
        """
        held, manifest = self.held, self.held.manifest
        beyond = ""
        if held.probe is None:
            return beyond
        at = self.probing.at(pattern)
        for bound in made:
            program = f"{bound.content or f'{at} {strict_json.digest(bound.program.to_json())}'} {held.chosen}"
            ran_on = [] if bound.backend == "eager" else [bound.backend, bound.place.name if bound.place else ""]
            key = probes.cache_key(
                manifest.digest, program, str(held.device), str(held.prologue), *ran_on, *([str(held.cast.dtype)] if held.cast else [])
            )
            if not again and not held.swapped and probes.passed(key):
                continue
            with guarded(f"{self.probing.said(pattern)}: the probe", self._in_dtype):
                found = self.probing.check(pattern, self._at_rest(bound), [o.kind for o in bound.program.outputs])
            beyond = beyond or found
            if not held.swapped:
                probes.remember(key)
        return beyond
