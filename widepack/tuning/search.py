"""Searches the fastest plan for one entry, pattern and batch on this machine, by measurement.

1. **Profiles.** For every strategy that applies somewhere, the program with that strategy wherever it applies
   is timed node by node (`cost_of_nodes`). So each strategy is measured among values with the memory layout
   that it and its neighbours make. A program that takes `SLOW` times as long as the fastest so far is
   released at once, with its packed weights.
2. **Composition.** Nodes of one signature (op, types and kinds of their arguments, literals) choose together:
   the strategy that took the least time in its profile.
3. **End to end.** The plan by rules of thumb, the composed plan, every profile and the loop over all members
   run interleaved (`system/timing.py`).
4. **Refinement.** Within the budget the best plan is tried with another strategy for one signature, the most
   expensive first. A change is adopted if the plan is faster in most rounds.
5. **Backends.** The best plan, the plan of the ops' first strategies, the composed plan and the loop run on
   every other backend.
6. **Confirmation.** The best plan and those near it, the plan by rules of thumb and the loop run once more.
   The fastest is the result.

Before a program is chosen it passes the artifact's probe, and at the measured batch it gives the answers of
the loop.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from widepack_artifacts.program import Node, Program, Ref, refs

from ..errors import VerificationError
from ..ir.encoding import map_arguments
from ..planning.plan import NodeChoice, Plan
from ..registry.registry import strategies_of
from ..runtime.executable import Executable
from ..runtime.graph_module import graph_module
from ..system.progress import Report
from ..system.time_limit import NO_LIMIT, TimeLimit
from ..system.timing import LEAST_ROUNDS, fastest, race, ratio, waited, without_gc
from .candidate_pool import (
    COMPOSED,
    KEPT,
    LOOP,
    RULES,
    Candidate,
    CandidatePool,
    Workload,
    affordable,
    unique_candidates,
    with_choices,
)
from .report import TIME_OVER

RUNS = 5


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


OVER_THREADS = "over threads"
COMPILE_S = 120.0
NEAR = 1.3  # a race is short and a machine is noisy: a candidate this near the fastest races again
MEASURING = 0.5  # the part of a search's time limit that is measuring; the rest is lowering and compilation
PROFILES, RACE, REFINEMENT, BACKENDS = (
    0.4,
    0.3,
    0.3,
    0.6,
)  # parts of the time that is left when a stage begins
GAIN = 0.98  # a change is adopted if it takes at most this part of the time, in the median over rounds


@dataclass
class SearchResult:
    """The result of a search.

    best: the fastest candidate. on_eager: the fastest candidate on the backend `eager`. times_ms: the median
    milliseconds of every candidate in its last race. against_rules, against_loop: how many times as long the
    plan by rules of thumb and the loop take; None if they did not run. dropped: for each candidate that took
    no part, the reason. changes: the changes of the refinement that the best plan has.
    """

    best: Candidate
    on_eager: Candidate
    times_ms: dict[str, float]
    against_rules: float | None
    against_loop: float | None
    dropped: dict[str, str] = field(default_factory=dict)
    changes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class SearchOptions:
    """What the searches of all batches have in common.

    budget_s: seconds of measuring for each batch of a pattern. backends: other backends than `eager` that may
    be chosen. compile_s: seconds after which a search begins no compilation. progress: called with
    (stage, done, total).
    """

    budget_s: float
    backends: Sequence[str] = ()
    compile_s: float = COMPILE_S
    progress: Report | None = None


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
        super().__init__(work, bind, right)
        self.options, self.budget_s, self.label = options, options.budget_s, label
        self.limit = NO_LIMIT
        self._costs: dict[str, dict[str, float]] = {}  # seconds by candidate and node

    def report(self, stage: str, done: int, total: int) -> None:
        """Reports the progress of a stage."""
        if self.options.progress is not None:
            self.options.progress(f"{self.label}: {stage}", done, total)

    def run(self, limit: TimeLimit = NO_LIMIT) -> SearchResult:
        """Searches.

        limit: When the search must end. It measures less if its time is short; the plan by rules of thumb,
        the wide plan and the loop are always measured.

        Raises: VerificationError if no program gives right answers.
        """
        start = time.perf_counter()
        self.limit = limit
        self.budget_s = min(self.budget_s, MEASURING * limit.left)
        candidates, groups = self.candidates(limit.part(PROFILES))
        rules, loop = self.named(RULES), self.named(LOOP)
        times = self._race("end to end", candidates, limit.part(RACE))
        first = next(c for c in candidates if c.name == fastest(times))
        eager, changes = self._refine(first, groups, start)
        finalists = self.ready(eager, first, rules, loop, *self._on_backends(eager, limit.part(BACKENDS)))
        # The best of many was also lucky. So the times are those of another race, with the candidates near
        # it.
        if len(finalists) > 3:
            raced = self._race("confirm", finalists, limit.part(1 / 2))
            times |= raced
            near = _near([c for c in finalists if c.name in raced], raced)
            finalists = self.ready(*near, rules, loop, eager, first)
        last = self._race("confirm again", finalists, limit)
        finalists = [c for c in finalists if c.name in last]
        winner = _fastest_of(finalists, last)
        on_eager = _fastest_of([c for c in finalists if c.backend == "eager"], last)
        against = {c.name: ratio(last, c.name, winner.name) for c in finalists}
        self.release_all_but(winner, rules, loop)
        return SearchResult(
            winner,
            on_eager,
            {n: round(1e3 * sorted(t)[len(t) // 2], 6) for n, t in {**times, **last}.items()},
            against.get(rules.name) if rules is not None else None,
            against.get(loop.name) if loop is not None else None,
            self.dropped,
            changes if eager.name in (winner.name, winner.origin) else [],
        )

    def _race(self, stage: str, candidates: Sequence[Candidate], limit: TimeLimit) -> dict[str, list[float]]:
        """Races candidates; if the time is short, without the slowest of them."""
        racing = affordable(candidates, limit.left / LEAST_ROUNDS)
        self.dropped |= {
            c.name: f"{TIME_OVER} before it was compared with the others"
            for c in candidates
            if c not in racing
        }
        return race(
            {c.name: self.call(c) for c in racing},
            self.budget_s / 4,
            limit_s=limit.left,
            report=lambda done, total: self.report(stage, done, total),
        )

    # ------------------------------------------------------------ profiles and composition

    def candidates(self, limit: TimeLimit = NO_LIMIT) -> tuple[list[Candidate], list[list[Node]]]:
        """Makes the candidates on `eager`. limit: the time after which no further strategy is tried.

        Returns: the candidates that are right and not much slower than the fastest; the nodes by signature,
        the most expensive first. Raises: VerificationError if no candidate is right.
        """
        self.report(RULES, 0, 3)
        rules = self.candidate(RULES, self.rules())
        self.report(LOOP, 1, 3)
        loop = self.candidate(LOOP, self.whole("loop")[0])
        (wide,) = self.whole("wide")
        self.report("wide", 2, 3)
        base = self._profiled("wide", wide)
        profiles, loops = self._profiles(wide, loop, limit)
        loops = [rules, loop, *loops]
        loops += [self._over_threads(c) for c in unique_candidates(loops)]
        groups = self._groups(self._costs.get(base.name, {}) if base is not None else {})
        everything = unique_candidates([*loops, base, *profiles, self._composed(wide, groups)])
        screened = [c for c in everything if self.screened(c)]
        candidates: list[Candidate] = []
        for i, c in enumerate(screened):
            self.report("check answers", i, len(screened))
            if limit.over and c not in (rules, loop, base):
                self.dropped[c.name] = f"{TIME_OVER} before its answers were checked"
            elif self.is_right(c):
                candidates.append(c)
        if not candidates:
            reasons = "; ".join(f"{n}: {w}" for n, w in self.dropped.items())
            raise VerificationError(
                f"no wide program of {self.programs.pattern} gives right answers here: {reasons}"
            )
        return candidates, groups

    def _profiles(
        self, wide: Plan, loop: Candidate | None, limit: TimeLimit
    ) -> tuple[list[Candidate | None], list[Candidate | None]]:
        """Returns for each strategy the wide program, timed node by node, and the loop, if strategies have a
        form in it.
        """
        several = [s.values() for n in self.tuned if len(s := strategies_of(n.op)) > 1]
        names = list(dict.fromkeys(s.name for strategies in several for s in strategies if not s.on_request))
        profiles: list[Candidate | None] = []
        loops: list[Candidate | None] = []
        for i, name in enumerate(names):
            if limit.over:
                self.dropped[name] = f"{TIME_OVER} before it was tried"
                continue
            self.report(f"strategy {name}", i, len(names))
            choices = {
                n.name: NodeChoice(name, "measured") for n in self.tuned if name in strategies_of(n.op)
            }
            profiles.append(self.screened(self._profiled(name, with_choices(wide, choices))))
            if loop is not None:
                plan = with_choices(loop.plan, choices)
                loops.append(self.screened(self.candidate(f"{LOOP}, {name}", plan)))
        return profiles, loops

    def _profiled(self, name: str, plan: Plan) -> Candidate | None:
        """Returns a candidate that was timed node by node."""
        c = self.candidate(name, plan)
        # the plan by rules of thumb may run the same program and be timed already
        if c is not None and c.bound is not None and c.name not in self._costs:
            budget_s = min(0.3, self.budget_s / 40)
            self._costs[c.name] = cost_of_nodes(c.bound.executable, self.device, self.inputs, budget_s)
        return c

    def _over_threads(self, loop: Candidate) -> Candidate | None:
        """Returns a plan whose loops run one member on each thread; None without threads or loops."""
        threads = torch.get_num_threads()
        if threads < 2 or self.device.type != "cpu" or not loop.plan.looped():
            return None
        return self.screened(
            self.candidate(f"{loop.name} {OVER_THREADS}", replace(loop.plan, workers=threads))
        )

    def _groups(self, seconds: dict[str, float]) -> list[list[Node]]:
        """Returns the nodes by signature, the most expensive first."""
        groups: dict[str, list[Node]] = {}
        for node in self.tuned:
            groups.setdefault(self.signature(node), []).append(node)
        return sorted(groups.values(), key=lambda nodes: -sum(seconds.get(n.name, 0.0) for n in nodes))

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

    def _profiled_candidates(self) -> list[Candidate]:
        return [c for c in self.all if c.name in self._costs]

    def _composed(self, wide: Plan, groups: Sequence[Sequence[Node]]) -> Candidate | None:
        """Returns the plan in which every signature has the fastest strategy of its profiles."""
        composed: dict[str, NodeChoice] = {}
        profiles = self._profiled_candidates()
        for nodes in groups:
            seconds = {
                p.used[nodes[0].name]: sum(self._costs[p.name].get(n.name, 0.0) for n in nodes)
                for p in reversed(profiles)
            }
            if len(seconds) > 1:
                order = sorted(seconds, key=lambda s: seconds[s])
                words = ", ".join(f"{s} {seconds[s] * 1e3:.3f} ms" for s in order)
                choice = NodeChoice(order[0], f"measured, {len(nodes)} alike: {words}")
                composed.update({n.name: choice for n in nodes})
        return self.candidate(COMPOSED, with_choices(wide, composed)) if composed else None

    # ------------------------------------------------------------ refinement and backends

    def _refine(
        self, best: Candidate, groups: Sequence[Sequence[Node]], start: float
    ) -> tuple[Candidate, list[str]]:
        """Tries other strategies in the best plan, signature by signature.

        Returns: the best plan; the changes that made it faster as a whole.
        """
        changes: list[str] = []
        first = best.name
        if best.plan.looped():
            return best, changes
        profiles, limit = self._profiled_candidates(), self.limit.part(REFINEMENT)
        for i, nodes in enumerate(groups):
            self.report("refine", i, len(groups))
            op, name = nodes[0].op, nodes[0].name
            for strategy in dict.fromkeys(p.used[name] for p in profiles):
                if time.perf_counter() - start > 0.75 * self.budget_s or limit.over:
                    return best, changes
                if strategy == best.used[name] or strategy not in strategies_of(op):
                    continue
                other = self._changed(best, nodes, strategy)
                if other is None:
                    continue
                times = race({c.name: self.call(c) for c in (best, other)}, self.budget_s / 40)
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

    def _on_backends(self, best: Candidate, limit: TimeLimit = NO_LIMIT) -> list[Candidate]:
        """Returns the promising plans on every other backend. limit: when their compilation must end."""
        (wide,) = self.whole("wide")
        # the best plan first, because the time for compilation may end before the others
        plans = {best.name: best.plan, "wide": wide, LOOP: self.whole("loop")[0]}
        plans |= {c.name: c.plan for c in self.all if c.name == COMPOSED}
        if (threads := torch.get_num_threads()) > 1:
            plans[f"{LOOP} {OVER_THREADS}"] = replace(plans[LOOP], workers=threads)
        candidates: list[Candidate | None] = []
        begin = time.perf_counter()
        for number, backend in enumerate(self.options.backends):
            for origin, plan in plans.items():
                if backend == "aot" and plan.workers:
                    continue  # its code has no threads for members
                name = f"{origin} on {backend}"
                self.report(name, number, len(self.options.backends))
                if limit.over or time.perf_counter() - begin > self.options.compile_s:
                    self.dropped[name] = (
                        f"the limit of {self.options.compile_s:.0f} s for compilation was reached"
                    )
                    if limit.over:
                        self.dropped[name] = f"{TIME_OVER} before it was tried"
                    continue
                self.compile_within(limit.left)
                c = self.screened(self.candidate(name, replace(plan, backend=backend), origin))
                candidates.append(c if c is not None and self.is_right(c) else None)
        return unique_candidates(candidates)


def _fastest_of(candidates: Sequence[Candidate], times: dict[str, list[float]]) -> Candidate:
    name = fastest({c.name: times[c.name] for c in candidates})
    return next(c for c in candidates if c.name == name)


def _near(candidates: Sequence[Candidate], times: dict[str, list[float]]) -> list[Candidate]:
    """Returns the fastest candidate, then those that are nearly as fast."""
    front = _fastest_of(candidates, times).name
    near = [c for c in candidates if ratio(times, c.name, front) <= NEAR]
    return sorted(near, key=lambda c: c.name != front)
