"""Searches the fastest plan for one entry, pattern and batch on this machine, by measurement.

1. **Forms.** The predicted plan, the loop over all members, the wide plan, and both with each strategy
   wherever it applies run a few calls. A program that takes `SLOW` times as long as the fastest so far is
   released at once, with its packed weights.
2. **ONNX Runtime.** Where it is installed, the loop and the wide plan run on it.
3. **Composition**, in a thorough search. Programs of single strategies are timed node by node
   (`cost_of_nodes`), so each strategy is measured among values with the memory layout that it and its
   neighbours make. Nodes of one signature (op, types and kinds of their arguments, literals) choose together
   the strategy that took the least time.
4. **Refinement**, in a thorough search. The best plan is tried with another strategy for one signature, the
   most expensive first. A change is adopted if the plan is faster in most rounds.
5. **Other backends**, in a thorough search: the best plan, the wide plan, the composed plan and the loop.
6. **Race.** The plans that are near the fastest one, the predicted plan and the loop run interleaved
   (`system/timing.py`), and the predicted plan a second time: how far its two times are apart is the noise. A
   noisy race is repeated with fewer plans and more time.

In a search that is not thorough, lowering and binding of the predicted plan, the loop, and the loop on ONNX
Runtime take none of its time, because they serve all batches.

Before a program races it passes the artifact's probe, and at the measured batch it gives the answers of the
predicted plan.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from widepack_artifacts import strict_json
from widepack_artifacts.program import Node, Program, Ref, refs, substitute

from ..ir import ops
from ..ir.encoding import map_arguments
from ..ir.op_records import is_recurrent_layer
from ..planning.plan import LOOP, NodeChoice, Plan, name_on
from ..registry.registry import strategies_of
from ..runtime.executable import Executable
from ..runtime.graph_module import graph_module
from ..runtime.prologue import split
from ..system.progress import Report
from ..system.time_limit import NO_LIMIT, TimeLimit
from ..system.timing import LEAST_ROUNDS, fastest, noise, race, ratio, waited, without_gc
from .candidate_pool import (
    COMPOSED,
    KEPT,
    PREDICTED,
    SLOW,
    Candidate,
    CandidatePool,
    Workload,
    affordable,
    with_choices,
)
from .report import TIME_OVER

RUNS = 5
ONNX, PACKED = "onnxruntime", "packed"
OVER_THREADS = "over threads"
AGAIN = "the predicted plan again"
COMPILE_S = 120.0
NEAR = 1.3  # a few calls are noisy: a candidate this near the fastest races
WIN = 1.05  # a search that is not thorough races only if another candidate is this near the predicted plan
STEADY = 1.1  # a race with more noise than this is repeated among the plans that are near,
AGAIN_S = 0.5  # for this many seconds
GAIN = 0.98  # a change is adopted if it takes at most this part of the time, in the median over rounds
MEASURING = 0.5  # the part of a search's time limit that is measuring; the rest is lowering and compilation
ONNX_CALL_S = 5e-5  # about what a call of a session takes without any work
CALLS = 7  # of each candidate with long calls: at its start, and in the race
WHERE = "(where)"  # a key beside the names of nodes: the session that owns the weights
FORMS, ONNX_PART, COMPOSITION, REFINEMENT, BACKENDS = 0.5, 0.8, 0.4, 0.3, 0.6
"""Parts of the time that is left when a stage begins."""
WIDE_PART = 0.3
"""The part of the time that is left which writing a wide program for ONNX Runtime may take in a build."""
RACE_S = 0.1
"""Seconds of a race of short calls, if the search is not thorough."""


class _TimedInterpreter(fx.Interpreter):
    """Records the seconds of every node that computes something, in the program's order."""

    def __init__(self, module: fx.GraphModule, device: torch.device) -> None:
        super().__init__(module)
        self.seconds: list[float] = []
        self._device = device

    def run_node(self, n: fx.Node) -> Any:
        if n.op not in ("call_function", "call_module"):
            return super().run_node(n)
        start = time.perf_counter()
        result = waited(lambda: super(_TimedInterpreter, self).run_node(n), self._device)()
        self.seconds.append(time.perf_counter() - start)
        return result


def cost_of_nodes(
    run: Executable, device: torch.device, inputs: Sequence[torch.Tensor], budget_s: float = 0.2
) -> dict[str, float]:
    """Returns the seconds of each node of the member program: the sum over the wide nodes that were made for
    it.

    The seconds are medians over several runs. `inputs` are those of a wide call.
    """
    module = graph_module(run.program, device, run.workers)
    runs: list[list[float]] = []
    end = time.perf_counter() + budget_s
    with torch.inference_mode(), without_gc():
        while len(runs) < RUNS or time.perf_counter() < end:
            interpreter = _TimedInterpreter(module, device)
            interpreter.run(*run.weights, *inputs)
            runs.append(interpreter.seconds)
    seconds: dict[str, float] = {}
    # the first run is slower, because it fills caches
    for node, times in zip(run.program.nodes, zip(*runs[1:], strict=True), strict=True):
        name = node.member or node.name
        seconds[name] = seconds.get(name, 0.0) + statistics.median(times)
    return seconds


@dataclass(frozen=True)
class MeasuredPlan:
    """A plan that was measured at one batch.

    plan, program: the plan and its wide program. used: the strategy of each node. forms: how it makes the
    copy of each weight that it keeps beside the mapped one. cost: how many times as long as the fastest plan
    it takes.
    """

    plan: Plan
    program: Program
    used: Mapping[str, str]
    forms: Mapping[str, str]
    cost: float

    @property
    def backend(self) -> str:
        """The backend that runs the plan."""
        return self.plan.backend or "eager"


@dataclass(frozen=True)
class SearchResult:
    """The plans that raced at one batch, by name; the predicted plan (`PREDICTED`) is one of them.

    times_ms: the median milliseconds of every candidate. loop: the name of the plan that is the loop over all
    members. noise: how far two times of the predicted plan are apart, as a factor. dropped: for each
    candidate that took no part, the reason. changes: what the refinement changed in the best plan.
    """

    plans: dict[str, MeasuredPlan]
    times_ms: dict[str, float]
    loop: str = LOOP
    noise: float = 1.0
    dropped: Mapping[str, str] = field(default_factory=dict)
    changes: Sequence[str] = ()


def weight_forms(c: Candidate) -> dict[str, str]:
    """Returns the weights of which a candidate keeps a copy in memory, and how that copy is made.

    Returns: by the weight's name a text that is equal for equal copies. A session of ONNX Runtime packs
    weights in its own way, and is one entry.
    """
    if c.backend == ONNX:
        return {WHERE: c.name}
    parts = split(c.program)
    made = {s.name: s.source for s in c.program.weights}
    sources = {s.name: frozenset([s.source]) for s in c.program.weights}
    copies: set[str] = set()
    for node in parts.prologue.nodes:
        read = list(refs((node.args, node.kwargs)))
        sources[node.name] = frozenset().union(*(sources.get(r, ()) for r in read))
        given = substitute([list(node.args), dict(node.kwargs)], lambda name: made.get(name, name))
        body = None if node.body is None else node.body.to_json()
        made[node.name] = strict_json.digest([node.op, repr(given), body])
        if not ops.may_view(node.op) or not copies.isdisjoint(read):
            copies.add(node.name)
    forms: dict[str, set[str]] = {}
    for name in parts.names:
        for source in sources[name] if name in copies else ():
            forms.setdefault(source, set()).add(made[name])
    return {source: " ".join(sorted(ways)) for source, ways in forms.items()}


@dataclass(frozen=True)
class SearchOptions:
    """What the searches of all batches have in common.

    budget_s: the most seconds of measuring for each batch of a pattern. backends: other backends than `eager`
    that may be chosen. thorough: whether single nodes are timed, plans refined, and programs compiled. packs:
    whether plans that pack weights may run; each has a copy of the weights. sparing: whether weights are so
    large that only programs near the fastest stay in memory. compile_s: seconds after which a
    search begins no compilation. progress: called with (stage, done, total). most_noise: the noise of a race,
    as a factor, with which a search ends.
    """

    budget_s: float
    backends: Sequence[str] = ()
    thorough: bool = True
    packs: bool = True
    sparing: bool = False
    compile_s: float = COMPILE_S
    progress: Report | None = None
    most_noise: float = math.inf


class UnsteadyError(Exception):
    """Equal calls took times further apart than `SearchOptions.most_noise` allows."""


class Search(CandidatePool):
    """The search for one batch of one pattern.

    Args:
        work, bind, right: As in `CandidatePool`.
        options: Those of all batches.
        label: What is searched, for the progress.
    """

    def __init__(
        self,
        work: Workload,
        bind: Callable[[Program, Plan], Any],
        right: Callable[[Any], str],
        options: SearchOptions,
        label: str = "",
    ) -> None:
        super().__init__(work, bind, right, NEAR if options.sparing else SLOW)
        self.options, self.label = options, label
        self.limit = self._last = NO_LIMIT
        self.budget_s, self._extended_s = options.budget_s, 0.0
        self._loop: Candidate | None = None
        self._always = set(KEPT)  # the candidates that race, however slow they are
        self._costs: dict[str, dict[str, float]] = {}  # seconds by candidate and node

    def report(self, stage: str, done: int, total: int) -> None:
        """Reports the progress of a stage."""
        if self.options.progress is not None:
            self.options.progress(f"{self.label}: {stage}", done, total)

    def _extend_limit(self) -> None:
        """Ends the search later by the time of lowering and binding so far, which serves all batches."""
        if not self.options.thorough:
            self.limit = self.limit.later(self.making_s - self._extended_s, self._last)
        self._extended_s = self.making_s

    def _reserved(self, share: float) -> float:
        """Returns the seconds at the end of the search that a stage with a share of it leaves."""
        return 0.0 if math.isinf(self.limit.left) else (1 - share) * self.limit.left

    def run(self, limit: TimeLimit = NO_LIMIT, last: TimeLimit | None = None) -> SearchResult | None:
        """Searches.

        Args:
            limit: When the search must end. The predicted plan and the loop are always measured.
            last: When the searches of all batches must end. Default: `limit`.

        Returns:
            The measurements; None if the predicted plan does not run, or gives wrong answers.
        """
        begin = time.perf_counter()
        self.limit, self._last = limit, last or limit
        self.budget_s = min(self.options.budget_s, MEASURING * limit.left)
        self.report(PREDICTED, 0, 2)
        predicted = self.candidate(PREDICTED, self.prediction())
        if predicted is None or not self.is_right(predicted):
            return None
        for step in (self._try_loop, partial(self._try_onnx, loop=True)):
            self._extend_limit()
            step()
        self._extend_limit()
        self._try_forms()
        self._try_onnx(loop=False)
        changes: list[str] = []
        if self.options.thorough:
            groups = self._compose(self.limit.part(COMPOSITION))
            best, changes = self._refine(self._fastest_right("eager"), groups, begin)
            for name in self.options.backends:
                self._try_backend(name, best)
        result = self._raced(predicted, self.limit, changes)
        if result.noise > self.options.most_noise:
            raise UnsteadyError(f"{self.label}: equal calls took times that are {result.noise:.2f}x apart")
        if self.options.thorough or self.options.sparing:
            self.release_all_but(predicted)
        return result

    # ------------------------------------------------------------ the forms of a program

    def _try_loop(self) -> None:
        """Measures the loop over all members on `eager`."""
        self.report(LOOP, 1, 2)
        self._loop = self.screened(self.candidate(LOOP, self.whole(LOOP)[0]))

    def _try_onnx(self, *, loop: bool) -> None:
        """Measures the loop, or the wide plan, on ONNX Runtime, if it may be chosen and can win."""
        if ONNX not in self.options.backends or not self.options.packs:
            return
        if not self.options.thorough and self._fastest_right().seconds < ONNX_CALL_S:
            return
        plan = self.whole(LOOP)[0] if loop else self.whole("wide")[0]
        plans = {LOOP if loop else "wide": plan}
        if loop and (threads := torch.get_num_threads()) > 1:
            plans = {f"{LOOP} {OVER_THREADS}": replace(plan, workers=threads), **plans}
        if not (loop or self.options.thorough) and any(is_recurrent_layer(n.op) for n in self.first.nodes):
            return  # a session has a node for each op of each step
        self._try_plans(ONNX, plans, ONNX_PART, 1.0 if loop or self.options.thorough else WIDE_PART)

    def _try_forms(self) -> None:
        """Measures plans on `eager`, the most promising first, as long as there is time for a few calls."""
        plans, reserved = list(self._forms()), self._reserved(FORMS)
        for done, (name, plan) in enumerate(plans):
            self.report(name, done, len(plans))
            left = self.limit.left - reserved
            if CALLS * max(c.seconds for c in self.all if c.name in KEPT) > left:
                self.dropped[name] = f"{TIME_OVER} before it was tried"
                continue
            self.screened(self.candidate(name, plan))

    def _forms(self) -> Iterator[tuple[str, Plan]]:
        """Yields the plans beside the predicted one and the loop, the most promising first."""
        loop, (wide,) = self.whole(LOOP)[0], self.whole("wide")
        yield "wide", wide
        for plan in self.whole("auto"):
            yield f"{PREDICTED} for batch {plan.batch[0]}", plan
        threads = torch.get_num_threads() if self.device.type == "cpu" and loop.looped() else 1
        if threads > 1:
            yield f"{LOOP} {OVER_THREADS}", replace(loop, workers=threads)
        for name in self._strategies() if self.options.packs else ():
            choices = {
                n.name: NodeChoice(name, "measured") for n in self.tuned if name in strategies_of(n.op)
            }
            yield name, with_choices(wide, choices)
            if name == PACKED:  # the one strategy that has a form of its own in loops
                yield f"{LOOP}, {name}", with_choices(loop, choices)
                if threads > 1:
                    over = replace(with_choices(loop, choices), workers=threads)
                    yield f"{LOOP}, {name} {OVER_THREADS}", over

    def _strategies(self) -> list[str]:
        """Returns the strategies that ops of the program have, and that need no request."""
        several = [s.values() for n in self.tuned if len(s := strategies_of(n.op)) > 1]
        names = dict.fromkeys(s.name for strategies in several for s in strategies if not s.on_request)
        return [n for n in names if n != PACKED or not self.plain]

    def _try_backend(self, backend: str, best: Candidate) -> None:
        """Measures plans on another backend. best: the fastest plan on `eager`."""
        plans = {best.name: best.plan, "wide": self.whole("wide")[0], LOOP: self.whole(LOOP)[0]}
        plans |= {c.name: c.plan for c in self.all if c.name == COMPOSED}
        if backend != ONNX:  # other code has no threads for members
            plans = {name: replace(plan, workers=0) for name, plan in plans.items()}
        self._try_plans(backend, plans, BACKENDS)

    def _try_plans(
        self, backend: str, plans: Mapping[str, Plan], share: float, compiling: float = 1.0
    ) -> None:
        """Measures plans on a backend, as long as there is time.

        plans: by their names on `eager`. share: of the time that is left now. compiling: the part of the time
        that is left for all batches in which one of them may be compiled.
        """
        begin, reserved = time.perf_counter(), self._reserved(share)
        for origin, plan in plans.items():
            name = name_on(origin, backend)
            self.report(name, 0, 1)
            over = self.limit.left <= reserved
            if over or time.perf_counter() - begin > self.options.compile_s:
                why = f"the limit of {self.options.compile_s:.0f} s for compilation was reached"
                self.dropped[name] = f"{TIME_OVER} before it was tried" if over else why
                continue
            self.compile_within(compiling * (self.limit if self.options.thorough else self._last).left)
            self.screened(self.candidate(name, replace(plan, backend=backend), origin))

    # ------------------------------------------------------------ composition and refinement

    def _compose(self, limit: TimeLimit) -> list[list[Node]]:
        """Measures the plan in which every signature has the fastest strategy of the wide plans.

        Returns: the nodes by signature, the most expensive first.
        """
        names = ["wide", *self._strategies()]
        wides = [c for c in self.all if c.bound is not None and c.name in names]
        for done, c in enumerate(wides):
            self.report(f"nodes of {c.name}", done, len(wides))
            if not limit.over:
                budget_s = min(0.3, self.budget_s / 40)
                self._costs[c.name] = cost_of_nodes(c.bound.executable, self.device, self.inputs, budget_s)
        groups: dict[str, list[Node]] = {}
        for node in self.tuned:
            groups.setdefault(self.signature(node), []).append(node)
        first = next(iter(self._costs.values()), {})
        found = sorted(groups.values(), key=lambda nodes: -sum(first.get(n.name, 0.0) for n in nodes))
        composed: dict[str, NodeChoice] = {}
        for nodes in found:
            seconds = {
                c.used[nodes[0].name]: sum(self._costs[c.name].get(n.name, 0.0) for n in nodes)
                for c in reversed(wides)
                if c.name in self._costs
            }
            if len(seconds) > 1:
                order = sorted(seconds, key=seconds.__getitem__)
                words = ", ".join(f"{s} {seconds[s] * 1e3:.3f} ms" for s in order)
                choice = NodeChoice(order[0], f"measured, {len(nodes)} alike: {words}")
                composed.update({n.name: choice for n in nodes})
        if composed:
            self.screened(self.candidate(COMPOSED, with_choices(self.whole("wide")[0], composed)))
        return found

    def signature(self, node: Node) -> str:
        """Returns what decides the time of a node: its op, the types and kinds of its arguments, its
        literals.
        """
        slots = (*self.first.weights, *self.first.inputs)
        types = {s.name: s.type for s in slots} | {n.name: n.out for n in self.first.nodes}
        read = [(types[r], self.kinds[r], r in self.early) for r in refs((node.args, node.kwargs))]

        def literal(value: Any) -> Any:
            return map_arguments(value, lambda v: "·" if isinstance(v, Ref) else v, as_lists=True)

        return repr(
            (node.op, read, literal(list(node.args)), {k: literal(v) for k, v in node.kwargs.items()})
        )

    def _refine(
        self, best: Candidate, groups: Sequence[Sequence[Node]], start: float
    ) -> tuple[Candidate, list[str]]:
        """Tries other strategies in the best plan, signature by signature.

        Returns: the best plan; the changes that made it faster as a whole.
        """
        changes: list[str] = []
        first = best.name
        if best.plan.looped() or best.backend != "eager":
            return best, changes
        used = [c.used for c in self.all if c.name in self._costs]
        limit = self.limit.part(REFINEMENT)
        for i, nodes in enumerate(groups):
            self.report("refine", i, len(groups))
            op, name = nodes[0].op, nodes[0].name
            for strategy in dict.fromkeys(u[name] for u in used):
                if time.perf_counter() - start > 0.75 * self.budget_s or limit.over:
                    return best, changes
                if strategy == best.used[name] or strategy not in strategies_of(op):
                    continue
                other = self._changed(best, nodes, strategy)
                if other is None:
                    continue
                pair = {c.name: self.call(c) for c in (best, other)}
                times = race(pair, self.budget_s / 40, clock=self.clock)
                if ratio(times, other.name, best.name) < GAIN:
                    gain = f"{ratio(times, best.name, other.name):.2f}x as a whole"
                    changes.append(f"{op} {strategy} instead of {best.used[name]}: {gain}")
                    best, other = other, best
                if other.name not in (*KEPT, first):
                    other.bound = None  # releases its packed weights
        return best, changes

    def _changed(self, best: Candidate, nodes: Sequence[Node], strategy: str) -> Candidate | None:
        """Returns a plan with another strategy for some nodes; None if it is wrong, fails, or was tried
        before.
        """
        name = f"{best.name}, {nodes[0].name} {strategy}"
        choices = {n.name: NodeChoice(strategy, "measured end to end") for n in nodes}
        c = self.candidate(name, with_choices(best.plan, choices))
        return c if c is not None and c is not best and c.name == name and self.is_right(c) else None

    # ------------------------------------------------------------ the race

    def also(self, name: str, plan: Plan, result: SearchResult, limit: TimeLimit) -> SearchResult:
        """Returns the measurements with another plan, which was the fastest at another batch."""
        predicted, other = self.named(PREDICTED), self.candidate(name, plan)
        if predicted is None or other is None:
            return result
        self._always |= {other.name, *result.plans}
        for c in self.all:
            if c.name in self._always:
                self.bound(c)
        return self._raced(predicted, limit, result.changes)

    def _fastest_right(self, backend: str = "") -> Candidate:
        """Returns the fastest candidate so far whose answers are right. backend: "" for any."""
        ready = [c for c in self.ready(*self.all) if backend in ("", c.backend)]
        return next(c for c in sorted(ready, key=lambda c: c.seconds) if self.is_right(c))

    def _raced(self, predicted: Candidate, limit: TimeLimit, changes: Sequence[str]) -> SearchResult:
        """Races the candidates near the fastest one, the predicted plan (twice), and the loop."""
        least = self._fastest_right().seconds
        racing = [c for c in self.ready(*self.all) if c.name in self._always or c.seconds <= NEAR * least]
        apart = 1.0
        times = {c.name: [c.seconds] for c in racing}
        may_win = any(c is not predicted and c.seconds < WIN * predicted.seconds for c in racing)
        if self.options.thorough or may_win:
            seconds = self.budget_s / 4 if self.options.thorough else RACE_S
            racing, times, apart = self._race(predicted, racing, seconds, limit)
            lucky = self.options.thorough and len(racing) > 3  # the best of many was also lucky
            if lucky or apart > STEADY:
                first = fastest(times)
                near = [c for c in racing if c.name in self._always or ratio(times, c.name, first) <= NEAR]
                racing, last, apart = self._race(predicted, near, max(seconds, AGAIN_S), limit)
                times |= last
        else:
            racing = [c for c in racing if c.name in self._always and self.is_right(c)]
        first = fastest({c.name: times[c.name] for c in racing})
        plans = {
            c.name: MeasuredPlan(c.plan, c.program, c.used, weight_forms(c), ratio(times, c.name, first))
            for c in racing
        }
        seconds_of = {c.name: c.seconds for c in self.all if c.name not in self.dropped}
        seconds_of |= {n: statistics.median(t) for n, t in times.items()}
        loop = self._loop.name if self._loop is not None and self._loop.name in plans else ""
        if loop:
            seconds_of[LOOP] = seconds_of[loop]  # `route` reads its time by this name
        times_ms = {n: round(1e3 * s, 6) for n, s in seconds_of.items()}
        return SearchResult(plans, times_ms, loop, apart, dict(self.dropped), tuple(changes))

    def _race(
        self, predicted: Candidate, candidates: Sequence[Candidate], seconds: float, limit: TimeLimit
    ) -> tuple[list[Candidate], dict[str, list[float]], float]:
        """Returns the candidates whose answers are right, their times, and the noise of the race."""
        racing = []
        for done, c in enumerate(candidates):
            self.report("check answers", done, len(candidates))
            racing += [c] if self.is_right(c) else []
        racing = affordable(racing, limit.left / LEAST_ROUNDS)
        times = race(
            {c.name: self.call(c) for c in racing} | {AGAIN: self.call(predicted)},
            min(seconds, limit.left),
            limit_s=limit.left,
            report=lambda done, total: self.report("race", done, total),
            clock=self.clock,
        )
        apart = noise(times, AGAIN, PREDICTED)
        del times[AGAIN]
        return racing, times, apart
