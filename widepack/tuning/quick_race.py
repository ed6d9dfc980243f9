"""Chooses the plans of a new artifact by a quick race on this machine: `widepack.build(race=True)`."""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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
from ..planning.plan import Plan
from ..spec.entries import PATTERNS
from ..system.autocast import plain_modes
from ..system.machine import name_of
from ..system.memory import available_bytes
from ..system.progress import Report
from ..system.time_limit import TimeLimit
from .candidate_pool import LOOP, RULES
from .quick_search import CALLS, QuickSearch, RacedBatch, chosen_plans
from .report import TIME_OVER, MeasuredBatch, TuneReport, publish_plans
from .search import SearchOptions
from .searches import batch_classes, searches_of

SECONDS = 10.0
BATCHES = (1, 2, 8, 32)
COPIES = 4  # copies of the weights that must fit into memory for a race with packed weights

_VARIABLE = "WIDEPACK_RACE_S"

Plans = list[tuple[Program, Plan]]
Bind = Callable[[Program, Plan], Any]
BoundPrograms = dict[tuple[int, int], tuple[Program, Any]]
"""Bound programs by the number of the program's object and the number of workers."""


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
