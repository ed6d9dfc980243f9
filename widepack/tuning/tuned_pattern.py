"""Searches the plans of one pattern of an entry, for all batches together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from widepack_artifacts.program import Program

from ..errors import VerificationError
from ..inference.entry import WideEntry
from ..planning.plan import Plan
from ..system.machine import name_of
from ..system.time_limit import NO_LIMIT, TimeLimit
from .report import MeasuredBatch
from .search import Search, SearchOptions, SearchResult
from .searches import batch_classes, searches_of
from .weight_forms import one_form, without_forms

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
