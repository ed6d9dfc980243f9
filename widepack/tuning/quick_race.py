"""Chooses the plans of a new artifact by a quick race on this machine: `widepack.build(race=True)`.

For one pattern and batch these run: the plans by rules of thumb of all batch classes, the wide plan, and the
loop over members with plain and with packed weights. Each runs about ten calls. A plan replaces that of the
batch only if its calls take at most `GAIN` times as long (the loop: `LOOP_GAIN`), and if it passes the answer
check.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike, fspath
from typing import Any

import torch

from widepack_artifacts.opset import EXTRA
from widepack_artifacts.program import Program

from ..errors import UsageError, VerificationError
from ..inference.entry import WideEntry
from ..inference.load import load
from ..inference.model import WideModel
from ..ir.random_ops import uses_random_ops
from ..planning.plan import NodeChoice, Plan
from ..registry.registry import strategies_of
from ..spec.entries import PATTERNS
from ..system.autocast import plain_modes
from ..system.machine import name_of
from ..system.memory import available_bytes
from ..system.progress import Report
from ..system.time_limit import NO_LIMIT, TimeLimit
from ..system.timing import LEAST_ROUNDS, LONG_S, once, race, ratio
from .candidate_pool import LOOP, RULES, Candidate, with_choices
from .report import TIME_OVER, MeasuredBatch, TuneReport, publish_plans
from .search import OVER_THREADS, Search, SearchOptions
from .searches import batch_classes, searches_of
from .tune import forms_of

SECONDS = 10.0
BATCHES = (1, 2, 8, 32)
COPIES = 4  # copies of the weights that must fit into memory for a race with packed weights
GAIN = 0.93  # a race is short: a plan that is a little faster may only be lucky
LOOP_GAIN = 0.98  # the loop is what users have without widepack: no plan may be slower
SLOWER = 1.5  # other plans whose first calls take this many times as long as the fastest take no part
RACE_S = 0.1  # seconds of a race of short calls
CALLS = 7  # calls of each plan with long calls: at its start, and in the race
PACKED = "packed"

_VARIABLE = "WIDEPACK_RACE_S"

Plans = list[tuple[Program, Plan]]
Bind = Callable[[Program, Plan], Any]
BoundPrograms = dict[tuple[int, int], tuple[Program, Any]]
"""Bound programs by the number of the program's object and the number of workers."""


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
            if not self.plain and PACKED in strategies_of(n.op)
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


def race_seconds() -> float:
    """Returns the seconds of a race: those of the environment variable WIDEPACK_RACE_S, or `SECONDS`.

    0 switches races off.

    Raises:
        UsageError: The variable is not a number from 0.
    """
    given = os.environ.get(_VARIABLE, "")
    try:
        seconds = float(given or SECONDS)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise UsageError(f"{_VARIABLE}={given}: give the seconds of a race, such as 10; 0 switches it off")
    return seconds


@plain_modes()
def race_plans(
    path: str | PathLike[str],
    *,
    seconds: float = SECONDS,
    batches: Sequence[int] = BATCHES,
    progress: Report | None = None,
) -> TuneReport:
    """Races the plans by rules of thumb, the loop and the wide plan, and publishes those that are faster.

    The plans are used on machines of this kind. Other machines use the plans by rules of thumb. So do
    patterns for which these are the fastest, or for which the time is too short. The times of the pattern
    `each` are always published where rows are independent, because `route` chooses by them.

    Args:
        path: The artifact, which no other process changes.
        seconds: The time of all races. A race of long calls may take a few calls more.
        batches: The batches to measure, where the time is enough. Batches beyond them use the plans by rules
            of thumb.
        progress: Called with (stage, done, total).

    Returns:
        A report with one row for each batch of a pattern that was measured.

    Raises:
        ArtifactError: The artifact is damaged, or cannot be written.
    """
    limit = TimeLimit.of(seconds)
    ens = load(path, backend="eager", warmup=False, allow_ops=tuple(EXTRA))
    digest, device = ens.manifest.digest, str(ens.device)
    rows: list[MeasuredBatch] = []
    refused: dict[str, str] = {}
    plans: dict[tuple[str, str], Plans] = {}
    pairs = list(itertools.product(filter(partial(_may_race, ens), ens.entries), PATTERNS))
    for done, (name, pattern) in enumerate(pairs):
        if progress is not None:
            progress(f"race {name} {pattern}", done, len(pairs))
        part = limit.part(1 / (len(pairs) - done))
        entry = ens.entry(name)
        searches, _ = searches_of(QuickSearch, entry, pattern, batches, SearchOptions(seconds))
        raced = _raced(searches, part, _may_pack(ens))
        refused |= {f"{name}, {pattern}, batch {b}": TIME_OVER for b in searches if b not in raced}
        names = chosen_plans(raced) if raced else {}
        classes = batch_classes({b: s.scaled for b, s in searches.items()})
        rows += [_row(entry, pattern, b, classes[b], raced[b], n) for b, n in names.items()]
        if any(n != RULES for n in names.values()) or _has_prices(entry, pattern, raced):
            plans[name, pattern] = programs_by_class(entry, pattern, raced, names, classes)
    if plans:
        digest = publish_plans(path, device, plans, digest)
    return TuneReport(
        path=fspath(path),
        machine=name_of(device),
        threads=torch.get_num_threads(),
        backends=("eager",),
        rows=tuple(rows),
        refused=refused,
        kept=fspath(path) if plans else "",
        digest=digest,
    )


def _may_race(ens: WideModel, name: str) -> bool:
    """Returns whether an entry has programs for this device and draws no random numbers."""
    entry = ens.entry(name)
    here = any(w.device == ens.device.type for w in entry.entry.wide)
    return here and not uses_random_ops(entry.programs.source.member(0)[0])


def _may_pack(ens: WideModel) -> bool:
    """Returns whether the memory is enough for packed copies of the weights."""
    available = available_bytes()
    stored = sum(file.bytes for name, file in ens.manifest.files.items() if name.startswith("weights"))
    return available is None or COPIES * stored < available


def _has_prices(entry: WideEntry, pattern: str, raced: Mapping[int, RacedBatch]) -> bool:
    """Returns whether `route` chooses between padded and grouped rows by the times of this pattern."""
    independent = entry.entry.rows is not None and entry.entry.rows.independent
    several = len(entry.programs.artifact.chosen) > 1
    return pattern == "each" and independent and several and any(LOOP in r.times_ms for r in raced.values())


def _raced(searches: Mapping[int, QuickSearch], limit: TimeLimit, packs: bool) -> dict[int, RacedBatch]:
    """Races the batches in their order, as long as the time is enough."""
    raced: dict[int, RacedBatch] = {}
    before: tuple[int, float] | None = None
    bound: BoundPrograms = {}
    for batch, search in sorted(searches.items()):
        # a call takes at most as many times as long as the batch is larger
        if before is not None and 2 * CALLS * before[1] * batch / before[0] > limit.left:
            break
        search.packs = packs
        search.bind = _kept(search.bind, bound)
        try:
            result = search.race_plans(limit)
        except VerificationError:  # raised for wrong answers of this batch; others may be right
            result = None
        finally:
            search.release()
        if result is None:
            break
        raced[batch], before = result, (batch, result.seconds)
    return raced


def _kept(bind: Bind, bound: BoundPrograms) -> Bind:
    """Returns a function that binds each program once, for all batches."""

    def bind_once(program: Program, plan: Plan) -> Any:
        key = id(program), plan.workers
        if key not in bound:
            bound[key] = program, bind(program, plan)  # the program stays, and so its number is its own
        return bound[key][1]

    return bind_once


def programs_by_class(
    entry: WideEntry,
    pattern: str,
    raced: Mapping[int, RacedBatch],
    names: Mapping[int, str],
    classes: Mapping[int, tuple[int, int | None]],
) -> Plans:
    """Returns the programs of a pattern with their plans, one batch class after the other.

    Beyond the last measured class there are the plans by rules of thumb, if they won at the last batch or
    all chosen plans have the weights as they are stored. Else the loop serves the larger batches, or a plan
    with the same form of weights.
    """
    programs, last = entry.programs, max(raced)
    here = partial(replace, machine=name_of(str(programs.artifact.device)), threads=torch.get_num_threads())
    found: Plans = []
    for batch, name in names.items():
        plan = raced[batch].plans[name].plan
        least, most = classes[batch]
        if batch == last and name.startswith(LOOP):
            most = None
        measured = here(plan, batch=(least, most), at=batch, times_ms=raced[batch].times_ms)
        found.append((raced[batch].plans[name].program, measured))
    end = found[-1][1].batch[1]
    if end is None:
        return found
    packed = next((f for b, n in names.items() if n != RULES and (f := raced[b].plans[n].forms)), None)
    if packed and names[last] != RULES:
        # other plans by rules of thumb may pack the same weights in another order
        plans = raced[last].plans
        fitting = [n for n in (LOOP, RULES) if n in plans and plans[n].forms in ({}, packed)]
        end_plan = plans[[*fitting, names[last]][0]]
        return [*found, (end_plan.program, here(end_plan.plan, batch=(end + 1, None)))]
    for stored in programs.source.wide(pattern):
        least, most = stored.plan.batch
        if most is None or most > end:
            found.append((stored.program, here(stored.plan, batch=(max(least, end + 1), most))))
    return found


def _row(
    entry: WideEntry, pattern: str, batch: int, classes: tuple[int, int | None], raced: RacedBatch, name: str
) -> MeasuredBatch:
    """Returns the report's row of a batch."""
    cost = raced.plans[name].cost
    loop = raced.plans.get(LOOP)
    return MeasuredBatch(
        entry=entry.name,
        pattern=pattern,
        batch=batch,
        classes=classes,
        chosen=name,
        backend="eager",
        strategies=dict(Counter(raced.plans[name].used.values())),
        ms=raced.times_ms[name],
        rules=raced.plans[RULES].cost / cost,
        loop=loop.cost / cost if loop is not None else None,
        times_ms=raced.times_ms,
        dropped=raced.dropped,
    )
