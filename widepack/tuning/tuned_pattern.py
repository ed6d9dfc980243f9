"""Searches the plans of one pattern of an entry, for all batches together.

The plans of all batch classes store each weight in one form (`one_form`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from widepack_artifacts.program import Program, refs

from ..errors import VerificationError
from ..inference.entry import WideEntry
from ..planning.plan import Plan
from ..system.machine import name_of
from ..system.time_limit import NO_LIMIT, TimeLimit
from ..system.timing import race, ratio
from .candidate_pool import LOOP, RULES, Candidate
from .report import MeasuredBatch
from .search import Search, SearchOptions, SearchResult
from .searches import batch_classes, searches_of

LAST = 0.1  # the part of a search's time that is left for the plans of all batches together


@dataclass(frozen=True)
class TunedPattern:
    """The plans of one pattern.

    programs: the wide programs with their plans, one batch class after the other.
    rows: what was measured, one row for each batch.
    refused: for each batch that was refused, the reason.
    """

    programs: list[tuple[Program, Plan]] = field(default_factory=list)
    rows: list[MeasuredBatch] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)


def tune_pattern(
    entry: WideEntry,
    pattern: str,
    batches: Sequence[int],
    options: SearchOptions,
    limit: TimeLimit = NO_LIMIT,
) -> TunedPattern:
    """Searches the plans of one pattern. The arguments are those of `searches_of`.

    limit: when all searches must end. They share the time equally; what one leaves, the next ones have.
    """
    searches, refused = searches_of(Search, entry, pattern, batches, options)
    results: dict[int, SearchResult] = {}
    for done, (batch, search) in enumerate(searches.items()):
        try:
            results[batch] = search.run(limit.part(1 / (len(searches) - done + LAST)))
        except VerificationError as e:  # other batches may be right
            refused[batch] = str(e)
    if not results:
        return TunedPattern(refused=refused)
    searches = {b: searches[b] for b in results}
    if options.progress is not None:
        options.progress(f"{entry.name} {pattern}: one form of each weight", 0, 1)
    chosen, on_eager = _serve(results, searches, min(options.budget_s, limit.left))
    # the classes are wider than in the searches if a batch was refused
    classes = batch_classes({b: s.scaled for b, s in searches.items()})
    machine, threads = name_of(str(entry.programs.artifact.device)), torch.get_num_threads()
    tuned = TunedPattern(refused=refused)
    for batch, result in chosen.items():
        best = result.best
        # a second program for machines where the backend's compiled program or package does not exist
        second = [on_eager[batch].best] if best.backend != "eager" else []
        for c in (best, *second):
            plan = replace(
                c.plan, batch=classes[batch], machine=machine, threads=threads, times_ms=result.times_ms
            )
            tuned.programs.append((c.program, plan))
        tuned.rows.append(
            MeasuredBatch(
                entry=entry.name,
                pattern=pattern,
                batch=batch,
                classes=classes[batch],
                chosen=best.name,
                backend=best.backend,
                strategies=dict(Counter(best.used.values())),
                ms=result.times_ms.get(best.name, 0.0) or without_forms(searches[batch], best),
                rules=result.against_rules,
                loop=result.against_loop,
                times_ms=result.times_ms,
                changes=tuple(result.changes),
                dropped=result.dropped,
            )
        )
    return tuned


def _serve(
    results: Mapping[int, SearchResult], searches: Mapping[int, Search], budget_s: float
) -> tuple[dict[int, SearchResult], dict[int, SearchResult]]:
    """Returns the plans of all batches, and those for machines that have the backend `eager` only."""
    chosen = one_form(results, searches, budget_s)
    if all(r.best.backend == "eager" for r in chosen.values()):
        return chosen, chosen
    eager = {
        b: r if r.best.backend == "eager" else replace(results[b], best=results[b].on_eager)
        for b, r in chosen.items()
    }
    return chosen, one_form(eager, searches, budget_s)


WHERE = "(where)"  # a key beside the names of nodes: the session that owns the weights


def one_form(
    results: Mapping[int, SearchResult], searches: Mapping[int, Search], budget_s: float
) -> dict[int, SearchResult]:
    """Returns the results with plans that have one form of each weight beside the mapped one.

    Weights in two packed orders would be in memory twice. If the best plans of the classes differ in that,
    one of them serves all classes, except those that the loop serves best. It is the plan with the least time
    over all batches.
    """
    forms = {b: forms_of(searches[b], r.best) for b, r in results.items()}
    strategies: dict[str, set[str]] = {}
    for form in forms.values():
        for node, strategy in form.items():
            strategies.setdefault(node, set()).add(strategy)
    if all(len(s) == 1 for s in strategies.values()):
        return dict(results)
    totals: dict[int, float] = {}
    served: dict[int, dict[int, SearchResult]] = {}
    for leader in (b for b in results if forms[b]):
        totals[leader], served[leader] = 0.0, {}
        for b, search in searches.items():
            plan = results[leader].best
            found = _serve_batch(search, results[b], plan, leader, b == leader, budget_s)
            served[leader][b], log_ratio = found
            totals[leader] += log_ratio
    chosen = served[min(totals, key=lambda of: totals[of])]
    return {b: results[b] if r.best is results[b].best else r for b, r in chosen.items()}


def _serve_batch(
    search: Search, result: SearchResult, leader: Candidate, of: int, is_own: bool, budget_s: float
) -> tuple[SearchResult, float]:
    """Serves a batch with the leader's plan, the rules of thumb in the same form, or the loop: the fastest of
    them.

    Returns: the result with this plan, which was measured again beside the batch's best one; the logarithm of
    its time relative to that, infinite if none of them runs.
    """
    mine: Candidate | None = leader if is_own else search.candidate(f"as at {of}", leader.plan)
    mine = mine if mine is not None and search.is_right(search.bound(mine)) else None
    rules, loop = search.named(RULES), search.named(LOOP)
    same_form = rules is not None and forms_of(search, rules) in ({}, forms_of(search, leader))
    options = {"mine": mine, "rules": rules if same_form else None, "loop": loop}
    runs = {k: c for k, c in options.items() if c is not None}
    calls = {k: search.call(c) for k, c in {**runs, "best": search.bound(result.best)}.items()}
    if rules is not None:
        calls["(rules)"] = search.call(rules)
    times = race(calls, budget_s / 20, limit_s=budget_s)
    if not runs:
        return result, math.inf
    use = min(runs, key=lambda k: ratio(times, k, "best"))
    against = {k: ratio(times, k, use) for k in ("(rules)", "loop") if k in times}
    ms = {c.name: 1e3 * sorted(times[k])[len(times[k]) // 2] for k, c in runs.items()}
    served = replace(
        result,
        best=runs[use],
        times_ms={**result.times_ms, **ms},
        against_rules=against.get("(rules)"),
        against_loop=against.get("loop"),
        changes=[],
    )
    return served, math.log(ratio(times, use, "best"))


def without_forms(search: Search, c: Candidate) -> float:
    """Returns the milliseconds of a candidate that took no part in its batch's race."""
    times = race({c.name: search.call(c)}, 0.0, limit_s=search.limit.left)[c.name]
    return 1e3 * sorted(times)[len(times) // 2]


def forms_of(search: Search, c: Candidate) -> dict[str, str]:
    """Returns the strategies of the nodes that read weights, except nodes that read the mapped weights."""
    looped = c.plan.looped()
    if c.backend == "onnxruntime":  # it packs weights in its own way, in one session for each program
        return {WHERE: f"{c.name} on onnxruntime"}

    def form(name: str) -> str:
        if name not in looped:
            return c.used[name]
        return f"{c.plan.choices[name].strategy} in loops" if name in c.plan.choices else ""

    reading = [
        n.name
        for n in search.first.nodes
        if n.name not in search.early and any(r in search.early for r in refs((n.args, n.kwargs)))
    ]
    forms = {name: form(name) for name in reading if form(name)}
    return {**forms, WHERE: ""} if forms else {}
