"""Tunes an artifact: chooses its plans by measurement on this machine, and stores them in the user's cache or
the artifact.

The plans of a pattern are searched for all batches together: those of all batch classes store each weight in
one form (`one_form`).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike, fspath

import torch

from widepack_artifacts.opset import EXTRA
from widepack_artifacts.program import Program, refs
from widepack_artifacts.writer import Writer

from ..errors import UsageError, VerificationError
from ..inference.entry import WideEntry
from ..inference.load import load
from ..inference.model import WideModel
from ..ir.random_ops import uses_random_ops
from ..planning import plan_cache
from ..planning.plan import Plan
from ..runtime.admission import guarded
from ..spec.entries import PATTERNS
from ..system.autocast import plain_modes
from ..system.machine import CHOOSABLE, backends_here, name_of
from ..system.progress import Report
from ..system.time_limit import NO_LIMIT, TimeLimit
from ..system.timing import race, ratio
from .candidate_pool import LOOP, RULES, Candidate
from .report import MeasuredBatch, TuneReport, publish_plans
from .search import COMPILE_S, Search, SearchOptions, SearchResult
from .searches import batch_classes, searches_of

BATCHES = (1, 8, 32)
WHERE = "(where)"  # a key beside the names of nodes: the session that owns the weights
LAST = 0.1  # the part of a search's time that is left for the plans of all batches together


@plain_modes()
def tune(
    path: str | PathLike[str],
    *,
    batches: Sequence[int] = BATCHES,
    patterns: Sequence[str] = PATTERNS,
    entries: Sequence[str] = (),
    budget_s: float = 20.0,
    device: str | None = None,
    threads: int | None = None,
    backends: Sequence[str] | None = None,
    cache: str | PathLike[str] | None = None,
    compile_s: float = COMPILE_S,
    write: bool = False,
    total_s: float | None = None,
    progress: Report | None = None,
) -> TuneReport:
    """Measures the strategies of an artifact on this machine and stores the fastest plan of each pattern and
    batch class.

    `widepack.load` uses a measured plan only on the machine where it was measured. A plan that names a
    backend runs on it if the cache has the compiled program; else the fastest plan on `eager` runs.

    Args:
        path: The artifact.
        batches: The batches to measure. Two batch classes meet at the geometric mean of their batches.
        patterns: The patterns of inputs, `shared` and `each`. Default: both.
        entries: The entries. Default: all.
        budget_s: Seconds of measuring for each batch of a pattern, without lowering and compilation.
        device: Where to run, for example `"cpu"` or `"cuda:0"`. Default: as in `load`.
        threads: The number of torch's threads, for this process. Default: unchanged.
        backends: The backends that a plan may name. `eager` is always one of them. Default: all that this
            machine has.
        cache: The folder of compiled programs. Default: as in `load`.
        compile_s: Seconds for each batch of a pattern after which no compilation begins.
        write: Publish the plans in the artifact, beside those by rules of thumb. Default: store them in the
            user's cache, those of each pattern as soon as they are measured. If publishing fails or is
            interrupted, the user's cache has the plans, too.
        total_s: Seconds that the whole call may take, with loading, lowering and compilation. Each batch of a
            pattern has an equal part, and measures for at most `budget_s` in it. With little time fewer
            plans are tried; the plan by rules of thumb, the wide plan and the loop are always measured, so
            a large artifact may need more. Default: no limit.
        progress: Called with (stage, done, total).

    Returns:
        A report with one row for each batch of a pattern.

    Raises:
        UsageError: An argument is wrong, an entry draws random numbers, no batch can be measured, or the
            user's cache cannot be written (checked before the measurement).
        ArtifactError: The folder is not an artifact, is damaged, was replaced in the meantime, or cannot be
            written.
        VerificationError: A program gives wrong answers on this machine.

    Example:
        >>> report = widepack.tune("ens.wide", batches=[1, 8])
        >>> report.rows[0].chosen, report.rows[0].ms
    """
    _check_arguments(batches, patterns, backends)
    limit = TimeLimit.of(total_s)
    if progress is not None:
        progress("load", 0, 1)
    ens = load(
        path,
        device=device,
        backend="eager",
        warmup=False,
        threads=threads,
        cache=cache,
        allow_ops=tuple(EXTRA),
    )
    names = tuple(entries or ens.entries)
    _refuse_random_entries(path, ens, names)
    _check_places(path, write)
    options = SearchOptions(budget_s, _other_backends(ens, backends), compile_s, progress)
    device, digest, kept = str(ens.device), ens.manifest.digest, fspath(path)
    tuned: dict[tuple[str, str], TunedPattern] = {}
    try:
        pairs, order = list(itertools.product(names, patterns)), sorted(set(batches))
        for done, (name, pattern) in enumerate(pairs):
            part = limit.part(1 / (len(pairs) - done))
            with guarded(f"{fspath(path)}: the programs of entry {name}, pattern {pattern}"):
                one = tune_pattern(ens.entry(name), pattern, order, options, part)
            tuned[name, pattern] = one
            if not write:
                kept = _store({(name, pattern): one}, digest, device) or kept
        refused = {f"{n}, {p}, batch {b}": w for (n, p), t in tuned.items() for b, w in t.refused.items()}
        plans = {place: t.programs for place, t in tuned.items() if t.programs}
        if not plans:
            reasons = "; ".join(f"{b}: {why}" for b, why in refused.items())
            raise UsageError(f"no batch could be measured: {reasons}")
        if write:
            digest = publish_plans(path, device, plans, digest)
    except BaseException:  # also after an interruption the measured plans go to the cache
        if write:
            _store(tuned, digest, device)
        raise
    return TuneReport(
        path=fspath(path),
        machine=name_of(device),
        threads=torch.get_num_threads(),
        backends=("eager", *options.backends),
        rows=tuple(row for t in tuned.values() for row in t.rows),
        refused=refused,
        kept=kept,
        digest=digest,
    )


def _store(tuned: Mapping[tuple[str, str], TunedPattern], digest: str, device: str) -> str:
    """Stores the plans of patterns in the user's cache. Returns: its folder; "" if there are no plans."""
    folder = ""
    for (name, pattern), one in tuned.items():
        if one.programs:
            folder = str(plan_cache.keep(digest, name, pattern, device, one.programs).parent)
    return folder


def _check_arguments(batches: Sequence[int], patterns: Sequence[str], backends: Sequence[str] | None) -> None:
    """Refuses batches, patterns and backends that cannot be measured. Raises: UsageError."""
    if not batches or any(isinstance(b, bool) or b < 1 for b in batches):
        raise UsageError(f"batches are whole numbers from 1, got {', '.join(map(str, batches)) or 'none'}")
    if unknown := [p for p in patterns if p not in PATTERNS] or (not patterns and ["(none given)"]):
        raise UsageError(f"unknown pattern {', '.join(map(str, unknown))}; known: {', '.join(PATTERNS)}")
    if unknown := [b for b in backends or () if b not in CHOOSABLE]:
        raise UsageError(
            f"a plan cannot name the backend {', '.join(unknown)}: a measured plan must run in another"
            f" process without compilation, and {', '.join(CHOOSABLE)} can; leave the backend out to try all"
            " of them that this machine has"
        )


def _check_places(path: str | PathLike[str], write: bool) -> None:
    """Checks before the measurement that its plans can be stored.

    Raises: ArtifactError if the artifact cannot be written; UsageError if the user's cache cannot.
    """
    if write:
        with Writer(path, force=True):  # takes the lock, and leaves the artifact as it is
            return
    plan_cache.check_writable()


def _refuse_random_entries(path: str | PathLike[str], ens: WideModel, names: Sequence[str]) -> None:
    """Refuses entries that draw random numbers, because their answers cannot be compared.

    Raises: UsageError.
    """
    for name in names:
        if uses_random_ops(ens.entry(name).programs.source.member(0)[0]):
            raise UsageError(
                f"{fspath(path)}: entry {name} draws random numbers at every call, but tune compares the"
                " answers of strategies; its plans by rules of thumb stay"
            )


def _other_backends(ens: WideModel, backends: Sequence[str] | None) -> tuple[str, ...]:
    """Returns the backends beside `eager` that may be chosen."""
    names = backends_here(str(ens.device)) if backends is None else backends
    return tuple(b for b in dict.fromkeys(names) if b != "eager")


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
