"""Plans by measurement: for one entry, pattern and batch, the fastest of what the registry has, on this machine.

1. **Profiles.** For every strategy that applies somewhere, the program with that strategy wherever it applies, clocked node by node (clocked.py): a strategy is
   measured among values that lie in memory as it and its neighbours leave them.
   A program that takes `SLOW` times as long as the fastest so far is let go of at once, and its packed weights with it.
2. **Composition.** Nodes of one signature (op, types and kinds of what they read, literals) choose together: the strategy that took the least time in its profile.
3. **End to end.** The plan by rules of thumb, the composed one, every profile and the whole program as one loop run interleaved (timing.py).
4. **Refinement.** Within the budget, signature by signature, dearest first, the best plan with another strategy there; taken where it is faster in most rounds.
5. **Backends.** The best plan, the one with the ops' first strategies, the composed one and the loop, each on every other backend that is there.
6. The best and those near it, the plan by rules of thumb and the loop run once more: the fastest there is the plan.

Every program that is chosen passes the artifact's probe, and answers as the loop does at the batch that it was measured at, before it is kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from widepack_artifacts import strict_json
from widepack_artifacts.program import Node, Program, Ref, refs

from ..backends.flat import nodes_unrolled
from ..backends.task import first_line
from .node_times import cost_of_nodes
from ..errors import UsageError, VerificationError
from ..ir.kinds import kinds, weights_only
from ..lowering.lower import lower
from ..kernels.packed import decompose
from ..planning.plan import Choice, Plan, for_size, scaled
from ..registry.registry import REGISTRY
from ..registry.registry import Choice as Asked
from ..lowering.relower import Simple
from ..ir.fake_values import Shapes
from ..planning.heuristics import plans
from ..system.timing import fastest, once, race, ratio

RULES, LOOP, COMPOSED, CHOSEN = "rules of thumb", "loop", "composed", "chosen"
KEPT = (RULES, LOOP, CHOSEN)  # not let go of, however slow
OVER_THREADS = "over threads"
COMPILE_S = 120.0
SLOW = 4.0  # what takes this many times as long as the fastest so far takes no part in the race
COMPILED = 600  # nodes of a program, as a compiler sees it, that a search has compiled: a tenth of a second each
NEAR = 1.3  # what takes at most this many times as long as the fastest of a race may be the fastest of the next: a race is short, and a machine is not quiet
GAIN = 0.98  # a change that is adopted takes at most this part of the time, in the median over rounds


@dataclass
class Candidate:
    """A plan and how it runs. used: strategy of each node of the member program. bound: what runs it; None where it was let go of. seconds: about how long a call takes.

    slower: how many times as long as the fastest of those before."""

    name: str
    plan: Plan
    program: Program
    used: Mapping[str, str]
    bound: Any
    seconds: float = 0.0
    slower: float = 1.0

    @property
    def backend(self) -> str:
        return self.plan.backend or "eager"


@dataclass
class Found:
    """What a search gives. on_eager: the best that runs without another backend. against_rules, against_loop: how many times as long those take; None where they did not run. times_ms: of every candidate of the last race, medians. dropped: candidate -> why it did not take part."""

    best: Candidate
    on_eager: Candidate
    times_ms: dict[str, float]
    against_rules: float | None
    against_loop: float | None
    dropped: dict[str, str] = field(default_factory=dict)
    changes: list[str] = field(default_factory=list)


class Search:
    """The search for one batch of one pattern.

    simple: the member programs. sizes: of all dims, the batch (the dim `letter`, or "") among them. classes: the batch class that the plan is for. bind: makes a
    wide program runnable, on the backend that its plan names. inputs: of a wide call at these sizes. right: why a program's answers are not right, or "".
    backends: other ones than `eager` that may be chosen. compile_s: seconds after which no compilation begins. shapes: of the member
    program's values at the example's sizes; searches that share them lower faster. plain: as the artifact's own plans are.
    """

    def __init__(
        self,
        simple: Simple,
        sizes: Mapping[str, int],
        letter: str,
        device: torch.device,
        pattern: str,
        bind: Callable[[Program, Plan], Any],
        inputs: Sequence[torch.Tensor],
        right: Callable[[Any], str],
        *,
        example: Mapping[str, int],
        budget_s: float,
        classes: tuple[int, int | None] = (1, None),
        backends: Sequence[str] = (),
        compile_s: float = COMPILE_S,
        shapes: Shapes | None = None,
        plain: bool = False,
        report: Callable[[str, int, int], None] | None = None,
    ) -> None:
        self.simple, self.sizes, self.letter, self.device, self.pattern = simple, sizes, letter, device, pattern
        self.bind, self.inputs, self.right, self.example, self.budget_s = bind, inputs, right, example, budget_s
        self.classes, self.backends, self.compile_s = classes, backends, compile_s
        self.plain = plain
        self.scaled = scaled(sizes, letter, example) or 1
        self.shapes = shapes or Shapes(example)
        self.report = report or (lambda stage, done, total: None)
        self.first = simple.programs[0]
        self.kinds = kinds(self.first, simple.slots)
        self.early = weights_only(self.first)
        self.tuned = [n for n in self.first.nodes if self.kinds[n.name] == "stacked" and n.name not in self.early and n.op in REGISTRY]
        self.dropped: dict[str, str] = {}
        self._made: dict[str, Candidate] = {}
        self._front: Candidate | None = None  # the fastest so far
        self._costs: dict[str, dict[str, float]] = {}

    # ------------------------------------------------------------ plans

    def whole(self, whole: str) -> list[Plan]:
        """The plans by rules of thumb: `auto`, or all `wide`, or all `loop`, least batch first."""
        return plans(
            self.first,
            self.simple.slots,
            len(self.simple.signatures),
            self.example,
            self.letter,
            self.device.type,
            self.pattern,
            Asked(whole, plain=self.plain),
        )

    def rules(self) -> Plan:
        """The plan by rules of thumb that is for this batch, counted at the example's sizes of the other dims."""
        return for_size(self.whole("auto"), self.scaled, lambda p: p)

    def candidate(self, name: str, plan: Plan) -> Candidate | None:
        """A plan made ready to run on its backend; None where it cannot be. Where there is one already that runs the same, that one."""
        plan = replace(plan, batch=self.classes, at=self.sizes.get(self.letter, 0))
        key = f"{plan.backend} {plan.workers} {sorted(plan.looped())} {sorted((n, c.strategy) for n, c in plan.choices.items())}"
        if key in self._made:
            return self._made[key]
        try:
            lowered = lower(self.simple.programs, self.simple.signatures, self.simple.slots, plan, self.example, self.shapes)
            program = decompose(lowered.program) if plan.backend else lowered.program
            same = f"{plan.backend} {plan.workers} {strict_json.digest(program.to_json())}"
            if same in self._made:  # the strategies that it names apply nowhere
                self._made[key] = self._made[same]
                return self._made[key]
            if plan.backend == "aot" and (many := nodes_unrolled(program)) > COMPILED:
                raise UsageError(f"{many} nodes with its loops written out, more than {COMPILED}: it would compile for long")
            bound = self.bind(lowered.program, plan)
            bound.run(*self.inputs)
        except Exception as e:  # noqa: BLE001  # what runs on somebody else's runtime fails in its own ways; whoever fails takes no part
            self.dropped[name] = f"{type(e).__name__}: {first_line(e)[:200]}"
            return None
        made = Candidate(name, plan, lowered.program, lowered.used, bound)
        self._made[key] = self._made[same] = made
        self._time(made)
        return made

    def _time(self, made: Candidate) -> None:
        """About how long it takes, beside the fastest so far at the same time."""
        front = self._front if self._front is not None and self._front.bound is not None else made
        tries = [(once(self.call(made)), once(self.call(front))) for _ in range(3)]
        made.seconds, least = (min(t) for t in zip(*tries))
        made.slower = made.seconds / least
        if made.slower <= 1:
            self._front = made

    def _screened(self, made: Candidate | None) -> Candidate | None:
        """The candidate, unless it is far slower than another one: then it is let go of, and its memory with it."""
        if made is None or made.bound is None:
            return None
        if made.slower > SLOW and made.name not in KEPT:
            self.dropped[made.name] = f"{made.slower:.1f} times as slow as the fastest at that time"
            made.bound = None
            return None
        return made

    # ------------------------------------------------------------ the search

    def signature(self, node: Node) -> str:
        """What decides how long a node takes: its op, the types and kinds of what it reads, its literals."""
        types = {s.name: s.type for s in (*self.first.weights, *self.first.inputs)} | {n.name: n.out for n in self.first.nodes}
        read = [(types[r], self.kinds[r], r in self.early) for r in refs((node.args, node.kwargs))]

        def literal(value: Any) -> Any:
            return "·" if isinstance(value, Ref) else [literal(v) for v in value] if isinstance(value, (list, tuple)) else value

        return repr((node.op, read, literal(list(node.args)), {k: literal(v) for k, v in node.kwargs.items()}))

    def run(self) -> Found:
        """Search. Raises: VerificationError where no program answers rightly."""
        start = time.perf_counter()
        candidates, groups = self.candidates()
        rules, loop = self.named(RULES), self.named(LOOP)
        self.report("end to end", 0, 1)
        times = race({c.name: self.call(c) for c in candidates}, self.budget_s / 4)
        first = next(c for c in candidates if c.name == fastest(times))
        eager, changes = self._refine(first, groups, start)
        finalists = self._ready(eager, first, rules, loop, *self._on_backends(eager))
        self.report("confirm", 0, 1)
        # who is the best of many has been lucky, too: the figures are those of another race, with those near it, who had less luck
        if len(finalists) > 3:
            times |= race({c.name: self.call(c) for c in finalists}, self.budget_s / 4)
            front = fastest({c.name: times[c.name] for c in finalists})
            near = sorted((c for c in finalists if ratio(times, c.name, front) <= NEAR), key=lambda c: c.name != front)
            finalists = self._ready(*near, rules, loop, eager, first)
        last = race({c.name: self.call(c) for c in finalists}, self.budget_s / 4)
        winner = next(c for c in finalists if c.name == fastest(last))
        of_eager = fastest({c.name: last[c.name] for c in finalists if c.backend == "eager"})
        on_eager = next(c for c in finalists if c.name == of_eager)
        if not winner.name.startswith(eager.name):  # the same plan on another backend has them, too
            changes = []
        medians = {n: round(1e3 * sorted(t)[len(t) // 2], 6) for n, t in {**times, **last}.items()}
        against = {c.name: ratio(last, c.name, winner.name) for c in finalists}
        rules_x, loop_x = (against.get(c.name) if c is not None else None for c in (rules, loop))
        for c in self._made.values():
            if c not in (winner, rules, loop):
                c.bound = None  # other batches are to be measured, and packed weights are a copy
        return Found(winner, on_eager, medians, rules_x, loop_x, self.dropped, changes)

    def _ready(self, *some: Candidate | None) -> list[Candidate]:
        """Those that may race, each once."""
        return [c for c in _different(some) if c.bound is not None and c.name not in self.dropped]

    def candidates(self) -> tuple[list[Candidate], list[list[Node]]]:
        """The candidates of the flat graph that are right and not far off, and the nodes of one signature together, dearest first. Raises: VerificationError."""
        rules = self.candidate(RULES, self.rules())
        loop = self.candidate(LOOP, self.whole("loop")[0])
        (wide,) = self.whole("wide")
        base = self._profiled("wide", wide)
        several = [p.strategies.values() for n in self.tuned if len((p := REGISTRY[n.op]).strategies) > 1]
        names = list(dict.fromkeys(s.name for strategies in several for s in strategies if not s.asked))
        profiles = [base]
        loops = [rules, loop]
        for i, name in enumerate(names):
            self.report(f"strategy {name}", i, len(names))
            choices = {n.name: Choice(name, "measured") for n in self.tuned if name in REGISTRY[n.op].strategies}
            profiles.append(self._screened(self._profiled(name, with_choices(wide, choices))))
            if loop is not None:  # some strategies have a form inside loops
                loops.append(self._screened(self.candidate(f"{LOOP}, {name}", with_choices(loop.plan, choices))))
        loops += [self._over_threads(c) for c in _different(loops)]
        groups: dict[str, list[Node]] = {}
        for node in self.tuned:
            groups.setdefault(self.signature(node), []).append(node)
        first = self._costs.get(base.name, {}) if base is not None else {}
        order = sorted(groups.values(), key=lambda nodes: -sum(first.get(n.name, 0.0) for n in nodes))
        found = [c for c in _different([*loops, *profiles, self._composed(wide, order)]) if self._screened(c)]
        found = [c for c in found if self.is_right(c)]
        if not found:
            raise VerificationError(
                f"no wide program of {self.pattern} answers rightly here: {'; '.join(f'{n}: {w}' for n, w in self.dropped.items())}"
            )
        return found, order

    def _over_threads(self, loop: Candidate) -> Candidate | None:
        """A plan with loops that run as many members at once as there are threads; None where there is one thread, or no loop."""
        threads = torch.get_num_threads()
        if threads < 2 or self.device.type != "cpu" or not loop.plan.looped():
            return None
        return self._screened(self.candidate(f"{loop.name} {OVER_THREADS}", replace(loop.plan, workers=threads)))

    def _profiled(self, name: str, plan: Plan) -> Candidate | None:
        """A candidate that was clocked node by node."""
        made = self.candidate(name, plan)
        if made is not None and made.bound is not None and made.name not in self._costs:  # the plan by rules of thumb may be the same
            self._costs[made.name] = cost_of_nodes(made.bound.executable, self.device, self.inputs, min(0.3, self.budget_s / 40))
        return made

    def _composed(self, wide: Plan, order: Sequence[Sequence[Node]]) -> Candidate | None:
        """Every signature with the strategy that took the least time in its profile."""
        composed: dict[str, Choice] = {}
        profiles = [c for c in _different(list(self._made.values())) if c.name in self._costs]
        for nodes in order:
            by = {p.used[nodes[0].name]: sum(self._costs[p.name].get(n.name, 0.0) for n in nodes) for p in reversed(profiles)}
            if len(by) > 1:
                cheapest = min(by, key=lambda s: by[s])
                words = ", ".join(f"{s} {by[s] * 1e3:.3f} ms" for s in sorted(by, key=lambda s: by[s]))
                composed.update({n.name: Choice(cheapest, f"measured, {len(nodes)} alike: {words}") for n in nodes})
        return self.candidate(COMPOSED, with_choices(wide, composed)) if composed else None

    def named(self, name: str) -> Candidate | None:
        """The plan by rules of thumb, or the loop, ready to run; None where it is wrong or does not run."""
        made = None if name in self.dropped else self.candidate(name, self.rules() if name == RULES else self.whole("loop")[0])
        return None if made is None or made.name in self.dropped else self.bound(made)

    def bound(self, made: Candidate) -> Candidate:
        """A candidate that runs, also where it was let go of. Raises: what binding does."""
        if made.bound is None:
            made.bound = self.bind(made.program, made.plan)
        return made

    def _on_backends(self, best: Candidate) -> list[Candidate]:
        """The plans worth it, on every other backend."""
        (wide,) = self.whole("wide")
        # the best first, since the time for compiling may be over before the others'
        plans = {best.name: best.plan, "wide": wide, LOOP: self.whole("loop")[0]}
        plans |= {c.name: c.plan for c in self._made.values() if c.name == COMPOSED}
        if (threads := torch.get_num_threads()) > 1:
            plans[f"{LOOP} {OVER_THREADS}"] = replace(plans[LOOP], workers=threads)
        made: list[Candidate | None] = []
        begin = time.perf_counter()
        for number, backend in enumerate(self.backends):
            for name, plan in plans.items():
                if backend == "aot" and plan.workers:
                    continue  # its code has no threads for members
                self.report(f"{name} on {backend}", number, len(self.backends))
                if time.perf_counter() - begin > self.compile_s:
                    self.dropped[f"{name} on {backend}"] = f"the {self.compile_s:.0f} s for compiling were over"
                    continue
                found = self._screened(self.candidate(f"{name} on {backend}", replace(plan, backend=backend)))
                made.append(found if found is not None and self.is_right(found) else None)
        return _different(made)

    def call(self, c: Candidate) -> Callable[[], object]:
        """A call of a candidate that is bound, as it is timed."""
        run, inputs = c.bound.run, self.inputs
        return lambda: run(*inputs)

    def is_right(self, c: Candidate) -> bool:
        """Whether a candidate may take part: its answers are right."""
        words = self.right(c.bound)
        if words:
            self.dropped[c.name] = words
        return not words

    def _refine(self, best: Candidate, order: Sequence[Sequence[Node]], start: float) -> tuple[Candidate, list[str]]:
        """The best plan with other strategies, signature by signature, where they make it faster as a whole."""
        changes: list[str] = []
        first = best.name
        if best.plan.looped():
            return best, changes
        profiles = [c for c in _different(list(self._made.values())) if c.name in self._costs]
        for i, nodes in enumerate(order):
            self.report("refine", i, len(order))
            known = dict.fromkeys(p.used[nodes[0].name] for p in profiles)
            for other in known:
                if time.perf_counter() - start > 0.75 * self.budget_s:
                    return best, changes
                if other == best.used[nodes[0].name] or other not in REGISTRY[nodes[0].op].strategies:
                    continue
                name = f"{best.name}, {nodes[0].name} {other}"
                made = self.candidate(name, with_choices(best.plan, {n.name: Choice(other, "measured end to end") for n in nodes}))
                if made is None or made is best or made.name != name or not self.is_right(made):
                    continue
                times = race({best.name: self.call(best), name: self.call(made)}, self.budget_s / 40)
                if ratio(times, name, best.name) < GAIN:
                    changes.append(f"{nodes[0].op} {other} instead of {best.used[nodes[0].name]}: {ratio(times, best.name, name):.2f}x as a whole")
                    best, made = made, best
                if made.name not in (*KEPT, first):
                    made.bound = None  # its memory, if it has packed weights
        return best, changes

    def again(self, plan: Plan) -> dict[str, list[float]]:
        """Seconds of a plan that was chosen before, as `CHOSEN`, and of every candidate there is, all in one race; without refinement."""
        chosen = self.candidate(CHOSEN, plan)
        if chosen is None:
            raise VerificationError(f"the plan that was chosen does not run here: {self.dropped[CHOSEN]}")
        if not self.is_right(chosen):
            raise VerificationError(f"the plan that was chosen answers wrongly here: {self.dropped[CHOSEN]}")
        candidates, _ = self.candidates()
        rest = self._on_backends(min(candidates, key=lambda c: c.seconds))
        calls = {c.name: self.call(c) for c in _different([*candidates, *rest]) if c is not chosen}
        return race({CHOSEN: self.call(chosen), **calls}, self.budget_s)


def _different(candidates: Sequence[Candidate | None]) -> list[Candidate]:
    """Those that there are, each once."""
    return list({id(c): c for c in candidates if c is not None}.values())


def with_choices(base: Plan, choices: Mapping[str, Choice]) -> Plan:
    """The plan with other strategies for some nodes."""
    return replace(base, choices={**base.choices, **choices})
