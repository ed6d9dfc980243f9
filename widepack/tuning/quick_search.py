"""Races the few plans that rules of thumb choose among, for one pattern and batch.

The plans are those by rules of thumb of all batch classes, the wide plan, and the loop over members with
plain and with packed weights. Each runs about ten calls. A plan replaces that of the batch only if its calls
take at most `GAIN` times as long (the loop: `LOOP_GAIN`), and if it passes the answer check.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from widepack_artifacts.program import Program

from ..planning.plan import NodeChoice, Plan
from ..registry.registry import REGISTRY
from ..system.time_limit import NO_LIMIT, TimeLimit
from ..system.timing import LEAST_ROUNDS, LONG_S, once, race, ratio
from .candidate_pool import LOOP, RULES, Candidate, with_choices
from .search import OVER_THREADS, Search
from .tuned_pattern import forms_of

GAIN = 0.93  # a race is short: a plan that is a little faster may only be lucky
LOOP_GAIN = 0.98  # the loop is what users have without widepack: no plan may be slower
SLOWER = 1.5  # other plans whose first calls take this many times as long as the fastest take no part
RACE_S = 0.1  # seconds of a race of short calls
CALLS = 7  # calls of each plan with long calls: at its start, and in the race
PACKED = "packed"


@dataclass(frozen=True)
class RacedPlan:
    """A plan that was measured at one batch.

    plan, program: the plan and its wide program. used: the strategy of each node. forms: the form in memory
    of each weight that it packs. cost: how many times as long as the fastest plan it takes.
    """

    plan: Plan
    program: Program
    used: Mapping[str, str]
    forms: Mapping[str, str]
    cost: float


@dataclass(frozen=True)
class RacedBatch:
    """The plans that were measured at one batch, by name, the milliseconds of their calls, and the plans that
    took no part, with the reason. `RULES` is always measured.
    """

    plans: dict[str, RacedPlan]
    times_ms: dict[str, float]
    dropped: dict[str, str]

    @property
    def seconds(self) -> float:
        """The seconds of a call of the fastest plan."""
        return min(self.times_ms.values()) / 1e3


class QuickSearch(Search):
    """The race of one batch. The arguments are those of `Search`."""

    packs = True
    """Whether plans that pack weights may run; each has a copy of the weights."""

    def race_plans(self, limit: TimeLimit = NO_LIMIT) -> RacedBatch | None:
        """Races the plans.

        limit: when the race must end. Plans that do not fit take no part.
        Returns: the measurements; None if there is no time for two plans, or the plan by rules of thumb does
        not run.
        """
        rules = self.candidate(RULES, self.rules())
        if rules is None or not self.is_right(rules):
            return None
        found = {RULES: rules}
        for name, plan in self._plans():
            if CALLS * sum(c.seconds for c in [*found.values(), rules]) > limit.left:
                break
            c = self.candidate(name, plan)
            if c is not None and all(c is not other for other in found.values()):
                found[name] = c
        if len(found) == 1:
            return None if limit.over else self._result(found, {RULES: [rules.seconds]})
        least = min(c.seconds for c in found.values())
        # the loop serves larger batches, if these are not measured
        racing = {n: c for n, c in found.items() if n in (RULES, LOOP) or c.seconds <= SLOWER * least}
        calls = {n: self.call(c) for n, c in racing.items()}
        times = race(calls, RACE_S, LEAST_ROUNDS + 2, limit_s=limit.left)
        wrong = {n for n, c in racing.items() if c is not rules and not self.is_right(c)}
        return self._result(
            {n: c for n, c in racing.items() if n not in wrong},
            {n: t for n, t in times.items() if n not in wrong},
        )

    def release(self) -> None:
        """Releases all candidates with their packed weights."""
        self.release_all_but()

    def _result(self, found: Mapping[str, Candidate], times: Mapping[str, list[float]]) -> RacedBatch:
        first = min(times, key=lambda n: ratio(times, n, RULES))
        plans = {
            n: RacedPlan(c.plan, c.program, c.used, forms_of(self, c), ratio(times, n, first))
            for n, c in found.items()
        }
        times_ms = {n: round(1e3 * sorted(t)[len(t) // 2], 6) for n, t in times.items()}
        return RacedBatch(plans, times_ms, dict(self.dropped))

    def _plans(self) -> Iterator[tuple[str, Plan]]:
        """Yields the plans beside that by rules of thumb, the most promising first."""
        loop, (wide,) = self.whole(LOOP)[0], self.whole("wide")
        yield LOOP, loop
        packs = self._packs()
        if packs and self.packs:
            yield f"{LOOP}, {PACKED}", with_choices(loop, packs)
        for plan in self.whole("auto"):
            yield f"{RULES}, batch {plan.batch[0]}", plan
        yield "wide", wide
        if (threads := torch.get_num_threads()) > 1 and self.device.type == "cpu":
            yield f"{LOOP} {OVER_THREADS}", replace(loop, workers=threads)

    def _packs(self) -> dict[str, NodeChoice]:
        """Returns the strategy `packed` for the nodes that the rules of thumb may pack."""
        return {
            n.name: NodeChoice(PACKED, "measured")
            for n in self.tuned
            if not self.plain and PACKED in REGISTRY[n.op].strategies
        }

    def _time(self, c: Candidate) -> None:
        """Measures about how long a candidate takes; with long calls, by one call."""
        c.seconds = once(self.call(c))
        if c.seconds < LONG_S:
            c.seconds = min(c.seconds, *(once(self.call(c)) for _ in range(3)))


def chosen_plans(raced: Mapping[int, RacedBatch]) -> dict[int, str]:
    """Returns the name of the plan for each batch.

    All plans store each weight in one form beside the mapped one, because weights in two packed orders would
    be in memory twice. The plans by rules of thumb do so, and are preferred: others must be faster by `GAIN`,
    the loop by `LOOP_GAIN`.
    """

    def total(names: Mapping[int, str]) -> float:
        return sum(math.log(_cost(raced[b], n)) for b, n in names.items())

    options = [dict.fromkeys(raced, RULES)]
    options += [{b: _best(r, form) for b, r in raced.items()} for form in _forms(raced)]
    return min((o for o in options if all(o.values())), key=total)


def _forms(raced: Mapping[int, RacedBatch]) -> list[dict[str, str]]:
    every = [dict(p.forms) for r in raced.values() for p in r.plans.values()]
    return [form for i, form in enumerate(every) if form not in every[:i]]


def _best(raced: RacedBatch, form: Mapping[str, str]) -> str:
    """Returns the fastest plan of one form of weights, or without packed weights; "" if there is none."""
    names = [n for n, p in raced.plans.items() if p.forms in ({}, form)]
    return min(names, key=lambda n: _cost(raced, n), default="")


def _cost(raced: RacedBatch, name: str) -> float:
    """Returns how many times as long as the fastest plan this one takes, less what the choice allows it."""
    allowed = {RULES: GAIN, LOOP: GAIN / LOOP_GAIN}
    return allowed.get(name, 1.0) * raced.plans[name].cost
