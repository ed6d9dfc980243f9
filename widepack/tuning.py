"""Plans by measurement: for one entry, pattern and batch, the fastest of what the registry has, on this machine.

1. **Profiles.** For every strategy that applies somewhere, the program with that strategy wherever it applies, clocked node by node (clocked.py): a strategy is
   measured among values that lie in memory as it and its neighbours leave them.
2. **Composition.** Nodes of one signature (op, types and kinds of what they read, literals) choose together: the strategy that took the least time in its profile.
3. **End to end.** The plan by rules of thumb, the composed one, every profile and the whole program as one loop run interleaved (timing.py); what is not clearly
   slower than the best goes on.
4. **Refinement.** Within the budget, signature by signature, dearest first, the best plan with another strategy there; taken where it is faster in most rounds.
5. The best plan has to be no slower than the plan by rules of thumb and than the loop, in rounds that chose nothing: else the faster of those two is the plan.

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

from .clocked import cost_of_nodes
from .errors import VerificationError, WidepackError
from .kinds import kinds, weights_only
from .lower import lower
from .plan import Choice, Plan
from .registry import REGISTRY
from .registry import Choice as Asked
from .relower import Simple
from .rules_of_thumb import plans
from .timing import fastest, race, ratio

RULES, LOOP, COMPOSED = "rules of thumb", "loop", "composed"
CLOSE = 1.1  # what takes this much longer than the best is out of the race
GAIN = 0.98  # a change that is adopted takes at most this part of the time, in the median over rounds


@dataclass(frozen=True)
class Candidate:
    """A plan and how it runs. used: strategy of each node of the member program. run: inputs -> outputs."""

    name: str
    plan: Plan
    program: Program
    used: Mapping[str, str]
    run: Callable[..., Any]
    bound: Any


@dataclass
class Found:
    """What a search gives. times_ms: of every candidate of the last race, medians. dropped: candidate -> why it did not take part."""

    best: Candidate
    times_ms: dict[str, float]
    against_rules: float
    against_loop: float
    dropped: dict[str, str] = field(default_factory=dict)
    changes: list[str] = field(default_factory=list)


class Search:
    """The search for one batch of one pattern.

    simple: the member programs. sizes: of all dims, the batch (the dim `letter`, or "") among them. bind: makes a wide program runnable. inputs: of a wide call
    at these sizes. right: why a program's answers are not right, or "".
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
        report: Callable[[str, int, int], None] | None = None,
    ) -> None:
        self.simple, self.sizes, self.letter, self.device, self.pattern = simple, sizes, letter, device, pattern
        self.bind, self.inputs, self.right, self.example, self.budget_s = bind, inputs, right, example, budget_s
        self.report = report or (lambda stage, done, total: None)
        self.first = simple.programs[0]
        self.kinds = kinds(self.first, simple.slots)
        self.early = weights_only(self.first)
        self.dropped: dict[str, str] = {}
        self._made: dict[str, Candidate] = {}

    # ------------------------------------------------------------ plans

    def _plans(self, whole: str) -> list[Plan]:
        return plans(
            self.first, self.simple.slots, len(self.simple.signatures), self.example, self.letter, self.device.type, self.pattern, Asked(whole)
        )

    def _rules(self) -> Plan:
        """The plan by rules of thumb that is for this batch, counted at the example's sizes of the other dims."""
        made, size = self._plans("auto"), self.scaled()
        return next((p for p in made if p.batch[0] <= size and (p.batch[1] is None or size <= p.batch[1])), made[-1])

    def scaled(self) -> int:
        """The batch, counted at the example's sizes of the other dims."""
        if self.letter not in self.sizes:
            return 1
        size = float(self.sizes[self.letter])
        for d, n in self.sizes.items():
            if d != self.letter:
                size *= n / max(self.example[d], 1)
        return max(1, round(size))

    def candidate(self, name: str, plan: Plan) -> Candidate | None:
        """A plan made ready to run; None where it cannot be, or is one that there is already."""
        key = f"{sorted(plan.looped())} {sorted((n, c.strategy) for n, c in plan.choices.items())}"
        if key in self._made:
            return self._made[key]
        try:
            lowered = lower(self.simple.programs, self.simple.signatures, self.simple.slots, plan, self.example)
            same = strict_json.digest(lowered.program.to_json())
            if same in self._made:  # the strategies that it names apply nowhere
                self._made[key] = self._made[same]
                return self._made[key]
            bound = self.bind(lowered.program, plan)
            bound.run(*self.inputs)
        except (WidepackError, RuntimeError, IndexError, ValueError) as e:
            self.dropped[name] = f"{type(e).__name__}: {str(e).splitlines()[0][:200]}"
            return None
        made = Candidate(name, plan, lowered.program, lowered.used, bound.run, bound)
        self._made[key] = self._made[same] = made
        return made

    def _with(self, base: Plan, choices: Mapping[str, Choice]) -> Plan:
        return replace(base, choices={**base.choices, **choices})

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
        rules = self.candidate(RULES, self._rules())
        loop = self.candidate(LOOP, self._plans("loop")[0])
        (wide,) = self._plans("wide")
        base = self.candidate("wide", wide)
        tuned = [n for n in self.first.nodes if self.kinds[n.name] == "stacked" and n.name not in self.early and n.op in REGISTRY]
        names = list(dict.fromkeys(s for n in tuned for s in REGISTRY[n.op].strategies if len(REGISTRY[n.op].strategies) > 1))
        loops: list[Candidate | None] = [rules, loop]
        wides: list[Candidate | None] = [base]
        costs: dict[str, dict[str, float]] = {}
        for i, name in enumerate(names):
            self.report(f"strategy {name}", i, len(names))
            choices = {n.name: Choice(name, "measured") for n in tuned if name in REGISTRY[n.op].strategies}
            wides.append(self.candidate(name, self._with(wide, choices)))
            if loop is not None:  # some strategies have a form inside loops
                loops.append(self.candidate(f"{LOOP}, {name}", self._with(loop.plan, choices)))
        profiles = _different(wides)
        for made in profiles:
            costs[made.name] = cost_of_nodes(made.bound.executable, self.device, self.inputs, min(0.3, self.budget_s / (4 * len(profiles))))
        groups: dict[str, list[Node]] = {}
        for node in tuned:
            groups.setdefault(self.signature(node), []).append(node)
        order = sorted(groups.values(), key=lambda nodes: -sum(costs[base.name].get(n.name, 0.0) for n in nodes)) if base is not None else []
        composed: dict[str, Choice] = {}
        for nodes in order:
            by = {p.used[nodes[0].name]: sum(costs[p.name].get(n.name, 0.0) for n in nodes) for p in reversed(profiles)}
            if len(by) > 1:
                cheapest = min(by, key=lambda s: by[s])
                words = ", ".join(f"{s} {by[s] * 1e3:.3f} ms" for s in sorted(by, key=lambda s: by[s]))
                composed.update({n.name: Choice(cheapest, f"measured, {len(nodes)} alike: {words}") for n in nodes})
        made_up = self.candidate(COMPOSED, self._with(wide, composed)) if composed else None
        candidates = [c for c in _different([*loops, *profiles, made_up]) if self.is_right(c)]
        if not candidates:
            raise VerificationError(
                f"no wide program of {self.pattern} answers rightly here: {'; '.join(f'{n}: {w}' for n, w in self.dropped.items())}"
            )
        self.report("end to end", 0, 1)
        times = race({c.name: self._call(c) for c in candidates}, self.budget_s / 4)
        best = next(c for c in candidates if c.name == fastest(times))
        best, changes = self._refine(best, order, profiles, start)
        self.report("confirm", 0, 1)
        finalists = list({c.name: c for c in (best, rules, loop) if c is not None and c.name not in self.dropped}.values())
        last = race({c.name: self._call(c) for c in finalists}, self.budget_s / 4)
        winner = next(c for c in finalists if c.name == fastest(last))
        if winner is not best:
            changes = []
        medians = {n: round(1e3 * sorted(t)[len(t) // 2], 6) for n, t in {**times, **last}.items()}
        against = {c.name: ratio(last, c.name, winner.name) for c in finalists}
        to = {RULES: rules, LOOP: loop}
        rules_x, loop_x = (against.get(c.name, 1.0) if (c := to[n]) is not None else 1.0 for n in (RULES, LOOP))
        return Found(winner, medians, rules_x, loop_x, self.dropped, changes)

    def _call(self, c: Candidate) -> Callable[[], object]:
        run, inputs = c.run, self.inputs
        return lambda: run(*inputs)

    def is_right(self, c: Candidate) -> bool:
        """Whether a candidate may take part: its answers are right."""
        words = self.right(c.bound)
        if words:
            self.dropped[c.name] = words
        return not words

    def _refine(self, best: Candidate, order: Sequence[Sequence[Node]], profiles: Sequence[Candidate], start: float) -> tuple[Candidate, list[str]]:
        """The best plan with other strategies, signature by signature, where they make it faster as a whole."""
        changes: list[str] = []
        if best.plan.looped():
            return best, changes
        for i, nodes in enumerate(order):
            self.report("refine", i, len(order))
            known = dict.fromkeys(p.used[nodes[0].name] for p in profiles)
            for other in known:
                if time.perf_counter() - start > 0.75 * self.budget_s:
                    return best, changes
                if other == best.used[nodes[0].name] or other not in REGISTRY[nodes[0].op].strategies:
                    continue
                name = f"{best.name}, {nodes[0].name} {other}"
                made = self.candidate(name, self._with(best.plan, {n.name: Choice(other, "measured end to end") for n in nodes}))
                if made is None or made is best or made.name != name or not self.is_right(made):
                    continue
                times = race({best.name: self._call(best), name: self._call(made)}, self.budget_s / 40)
                if ratio(times, name, best.name) < GAIN:
                    changes.append(f"{nodes[0].op} {other} instead of {best.used[nodes[0].name]}: {ratio(times, best.name, name):.2f}x as a whole")
                    best = made
        return best, changes


def _different(candidates: Sequence[Candidate | None]) -> list[Candidate]:
    """Those that there are, each once."""
    return list({id(c): c for c in candidates if c is not None}.values())
