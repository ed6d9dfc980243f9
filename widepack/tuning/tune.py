"""Measures the plans of an artifact on this machine, and stores the fastest in the user's cache or the
artifact.

`tune` searches thoroughly. `measure_new` does the same for a new artifact in the seconds of a build, without
timing single nodes and without compilation. The plans of a pattern are chosen for all batches together
(`choice.py`).
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike, fspath

import torch

from widepack_artifacts.manifest import Manifest
from widepack_artifacts.opset import EXTRA
from widepack_artifacts.writer import Writer

from ..errors import UsageError, VerificationError
from ..inference.entry import WideEntry
from ..inference.load import load
from ..inference.model import WideModel
from ..ir.random_ops import uses_random_ops
from ..planning import plan_cache
from ..planning.plan import LOOP, for_size
from ..runtime.admission import guarded
from ..spec.entries import PATTERNS
from ..system.autocast import plain_modes
from ..system.cores import free_threads
from ..system.machine import CHOOSABLE, backends_here, name_of
from ..system.memory import available_bytes
from ..system.progress import Report
from ..system.time_limit import NO_LIMIT, TimeLimit
from .candidate_pool import PREDICTED
from .choice import Plans, chosen_plans, conflicts, on_eager, programs_by_class
from .graph_files import publish_graphs
from .report import TIME_OVER, MeasuredBatch, TuneReport, publish_plans
from .search import CALLS, COMPILE_S, ONNX, Search, SearchOptions, SearchResult, UnsteadyError
from .searches import Prepared, batch_classes, searches_of

BATCHES = (1, 8, 32)
BUILD_S = 20.0  # the seconds in which a build measures, unless it is given others
COPIES = 4  # copies of the weights that must fit into memory for plans that pack weights
SMALL_BYTES = 32 << 20  # weights of at most this size may be in memory in several forms
LARGE_BYTES = 1 << 30  # of weights of more than this size, `tune` keeps few copies while it measures
MOST_UNSTEADY = 1.2  # a build whose calls on several threads have more noise measures with one thread
LAST = 0.1  # the part of a search's time that is left for the plans of all batches together

BUSY = "other processes use the cores, so the plans were measured with one thread"
WITHOUT_ONNX = "onnxruntime is not installed, so its plans were not tried: pip install 'widepack[cpu]'"
_BUDGET = "WIDEPACK_BUDGET"


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
        write: Publish the plans in the artifact, beside the predicted ones. Default: store them in the
            user's cache, those of each pattern as soon as they are measured. If publishing fails or is
            interrupted, the user's cache has the plans, too.
        total_s: Seconds that the whole call may take, with loading, lowering and compilation. Each batch of a
            pattern has an equal part, and measures for at most `budget_s` in it. With little time fewer
            plans are tried; the predicted plan and the loop are always measured, so a large artifact may
            need more. Default: no limit.
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
    options = SearchOptions(
        budget_s,
        _other_backends(ens, backends),
        packs=_may_pack(ens),
        sparing=_weight_bytes(ens.manifest) > LARGE_BYTES,
        compile_s=compile_s,
        progress=progress,
    )
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
        plans = {place: t.programs for place, t in tuned.items() if t.programs}
        if not plans:
            refused = _report(path, device, (), tuned, "", digest).refused
            raise UsageError(
                f"no batch could be measured: {'; '.join(f'{b}: {why}' for b, why in refused.items())}"
            )
        if write:
            digest = publish_graphs(path, publish_plans(path, device, plans, digest))
    except BaseException:  # also after an interruption the measured plans go to the cache
        if write:
            _store(tuned, digest, device)
        raise
    return _report(path, device, options.backends, tuned, kept, digest)


def build_seconds() -> float:
    """Returns the seconds in which a build measures: those of the environment variable WIDEPACK_BUDGET, or
    `BUILD_S`.

    Raises:
        UsageError: The variable is not a number from 0.
    """
    given = os.environ.get(_BUDGET, "")
    try:
        return checked_seconds(float(given or BUILD_S))
    except (ValueError, UsageError) as e:
        raise UsageError(
            f"{_BUDGET}={given}: give the seconds in which a build measures plans, such as 20; with 0 it "
            "only predicts them"
        ) from e


def checked_seconds(seconds: float) -> float:
    """Returns the seconds of `build(budget=)`. Raises: UsageError if they are no number from 0."""
    if isinstance(seconds, bool) or not 0 <= seconds < math.inf:
        raise UsageError(f"budget={seconds}: give seconds from 0; with 0 a build only predicts its plans")
    return float(seconds)


@plain_modes()
def measure_new(
    path: str | PathLike[str],
    *,
    seconds: float = BUILD_S,
    batches: Sequence[int] = BATCHES,
    progress: Report | None = None,
) -> TuneReport:
    """Measures the plans of a new artifact, and publishes those that are faster than the predicted ones.

    They are used on machines of this kind; other machines predict their own. So do patterns whose predicted
    plans are the fastest, or for which the time is too short. The times of the pattern `each` are always
    published where rows are independent, because `route` chooses by them.

    Args:
        path: The artifact, which no other process changes.
        seconds: The time of all measurements, by this thread's processor time; where other processes use the
            cores they take longer. A measurement of long calls may take a few calls more.
        batches: The batches to measure, where the time is enough. Batches beyond them use predicted plans.
        progress: Called with (stage, done, total).

    Returns:
        A report with one row for each batch of a pattern that was measured.

    Raises:
        ArtifactError: The artifact is damaged, or cannot be written.
    """
    limit, threads = TimeLimit.working(seconds), torch.get_num_threads()
    ens = load(path, backend="eager", warmup=False, allow_ops=tuple(EXTRA))
    device, digest = str(ens.device), ens.manifest.digest
    backends = tuple(b for b in backends_here(device) if b == ONNX)
    sparing = _weight_bytes(ens.manifest) > SMALL_BYTES
    options = SearchOptions(
        seconds, backends, thorough=False, packs=_may_pack(ens), sparing=sparing, progress=progress
    )
    names = [n for n in ens.entries if _is_measured(ens, n)]
    pairs = {(n, p): Prepared.of(ens.entry(n), p) for n, p in itertools.product(names, PATTERNS)}

    def searched(options: SearchOptions) -> dict[tuple[str, str], TunedPattern]:
        found: dict[tuple[str, str], TunedPattern] = {}
        for (name, pattern), prepared in pairs.items():
            part = limit.part(1 / (len(pairs) - len(found)))
            found[name, pattern] = tune_pattern(ens.entry(name), pattern, batches, options, part, prepared)
        return found

    measured, notes = None, [] if backends or ens.device.type != "cpu" else [WITHOUT_ONNX]
    try:
        if threads > 1 and free_threads(threads) > 1:
            with contextlib.suppress(UnsteadyError):  # from now on processes may use the cores
                measured = searched(replace(options, most_noise=MOST_UNSTEADY))
        if measured is None:
            torch.set_num_threads(1)
            measured = searched(options)
            notes += [BUSY] if threads > 1 else []
        plans = {
            (name, pattern): one.programs
            for (name, pattern), one in measured.items()
            if one.changed or (pattern == "each" and _has_prices(ens.entry(name), one))
        }
        if plans:
            digest = publish_graphs(path, publish_plans(path, device, plans, digest))
        return _report(
            path, device, backends, measured, fspath(path) if plans else "", digest, "; ".join(notes)
        )
    finally:
        torch.set_num_threads(threads)


def _is_measured(ens: WideModel, name: str) -> bool:
    """Returns whether an entry has programs for this device and draws no random numbers."""
    entry = ens.entry(name)
    here = any(w.device == ens.device.type for w in entry.entry.wide)
    return here and not uses_random_ops(entry.programs.source.member(0)[0])


def _may_pack(ens: WideModel) -> bool:
    """Returns whether the memory is enough for packed copies of the weights."""
    available = available_bytes()
    return available is None or COPIES * _weight_bytes(ens.manifest) < available


def _weight_bytes(manifest: Manifest) -> int:
    """Returns the bytes of the files of weights."""
    return sum(file.bytes for name, file in manifest.files.items() if name.startswith("weights"))


def _has_prices(entry: WideEntry, tuned: TunedPattern) -> bool:
    """Returns whether `route` chooses between padded and grouped rows by the times of `each`."""
    independent = entry.entry.rows is not None and entry.entry.rows.independent
    several = len(entry.programs.artifact.chosen) > 1
    return independent and several and any(LOOP in row.times_ms for row in tuned.rows)


def _report(
    path: str | PathLike[str],
    device: str,
    backends: Sequence[str],
    tuned: Mapping[tuple[str, str], TunedPattern],
    kept: str,
    digest: str,
    note: str = "",
) -> TuneReport:
    return TuneReport(
        path=fspath(path),
        machine=name_of(device),
        threads=torch.get_num_threads(),
        backends=("eager", *backends),
        rows=tuple(row for t in tuned.values() for row in t.rows),
        refused={f"{n}, {p}, batch {b}": w for (n, p), t in tuned.items() for b, w in t.refused.items()},
        kept=kept,
        digest=digest,
        note=note,
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
                " answers of strategies; its predicted plans stay"
            )


def _other_backends(ens: WideModel, backends: Sequence[str] | None) -> tuple[str, ...]:
    """Returns the backends beside `eager` that may be chosen."""
    names = backends_here(str(ens.device)) if backends is None else backends
    return tuple(b for b in dict.fromkeys(names) if b != "eager")


@dataclass(frozen=True)
class TunedPattern:
    """The plans of one pattern.

    programs: the wide programs with their plans, one batch class after the other; where a plan names another
    backend, the fastest one on `eager` follows it.
    rows: what was measured, one row for each batch.
    refused: for each batch that was not measured, the reason.
    changed: whether a plan is another one than the predicted one.
    """

    programs: Plans = field(default_factory=list)
    rows: list[MeasuredBatch] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)
    changed: bool = False


def tune_pattern(
    entry: WideEntry,
    pattern: str,
    batches: Sequence[int],
    options: SearchOptions,
    limit: TimeLimit = NO_LIMIT,
    prepared: Prepared | None = None,
) -> TunedPattern:
    """Searches the plans of one pattern. The arguments are those of `searches_of`.

    limit: when all searches must end. They share the time equally; what one leaves, the next ones have.
    """
    prepared = prepared or Prepared.of(entry, pattern)
    searches, refused = searches_of(entry, pattern, batches, options, prepared)
    results: dict[int, SearchResult] = {}
    for done, (batch, search) in enumerate(searches.items()):
        if not options.thorough and results and _too_long(results, batch, limit):
            refused[batch] = TIME_OVER
            continue
        part = limit.part(1 / (len(searches) - done + LAST))
        try:
            result = search.run(part, limit)
        except VerificationError as e:  # other batches may be right
            result, search.dropped[PREDICTED] = None, str(e)
        if result is None:
            refused[batch] = search.dropped.get(PREDICTED, "the predicted plan does not run")
        else:
            results[batch] = result
    wrong = [b for b in searches if refused.get(b, TIME_OVER) != TIME_OVER]
    classes = batch_classes({b: s.scaled for b, s in searches.items() if b not in wrong})
    if not results:
        return TunedPattern(refused=refused)
    if len(results) > 1 and not _are_small(entry) and conflicts(results):
        results = _with_winners_of_others(searches, results, limit)
    return _chosen(entry, pattern, results, classes, refused)


def _too_long(results: Mapping[int, SearchResult], batch: int, limit: TimeLimit) -> bool:
    """Returns whether a few calls at a batch take longer than is left: they take at most as many times as
    long as the batch is larger than the last one.
    """
    last = max(results)
    seconds = min(results[last].times_ms.values()) / 1e3
    return 2 * CALLS * seconds * batch / last > limit.left


def _with_winners_of_others(
    searches: Mapping[int, Search], results: Mapping[int, SearchResult], limit: TimeLimit
) -> dict[int, SearchResult]:
    """Returns the measurements of each batch with the fastest plans of the other batches, so that one of them
    may serve all.
    """
    found = dict(results)
    winners = {b: min(r.plans.items(), key=lambda item: item[1].cost) for b, r in results.items()}
    for batch, (other, (best, measured)) in itertools.product(results, winners.items()):
        if other == batch or best in results[batch].plans or limit.over:
            continue
        name = best if best in searches[batch].dropped else f"{best} of batch {other}"
        found[batch] = searches[batch].also(name, measured.plan, found[batch], limit.part(LAST))
    return found


def _chosen(
    entry: WideEntry,
    pattern: str,
    results: Mapping[int, SearchResult],
    classes: Mapping[int, tuple[int, int | None]],
    refused: dict[int, str],
) -> TunedPattern:
    """Returns the chosen plans of a pattern, and those on `eager` for machines without another backend."""
    source, device = entry.programs.source, str(entry.programs.artifact.device)
    predicted = [(s.program, s.plan) for s in source.not_measured(pattern)]
    one_form = not _are_small(entry)
    names = chosen_plans(results, one_form=one_form)
    programs = programs_by_class(results, names, classes, predicted)
    if any(plan.backend for _, plan in programs):
        fallback = programs_by_class(results, chosen_plans(results, on_eager, one_form), classes, predicted)
        programs = [*programs, *_fitting(programs, fallback)]
    last = max(names)
    if names[last].startswith(LOOP):
        classes = {**classes, last: (classes[last][0], None)}  # it serves all larger batches
    machine, threads = name_of(device), torch.get_num_threads()
    return TunedPattern(
        [(program, replace(plan, machine=machine, threads=threads)) for program, plan in programs],
        [_row(entry, pattern, b, classes[b], results[b], names[b]) for b in names],
        refused,
        any(n != PREDICTED for n in names.values()),
    )


def _are_small(entry: WideEntry) -> bool:
    """Returns whether the weights may be in memory in several forms."""
    return _weight_bytes(entry.programs.artifact.manifest) <= SMALL_BYTES


def _fitting(programs: Plans, fallback: Plans) -> Plans:
    """Returns the plans on `eager` for the batch classes whose plans name another backend."""
    found = Plans()
    for _, plan in programs:
        if plan.backend:
            program, other = for_size(fallback, plan.batch[0], lambda row: row[1])
            found.append((program, replace(other, batch=plan.batch)))
    return found


def _row(
    entry: WideEntry,
    pattern: str,
    batch: int,
    classes: tuple[int, int | None],
    result: SearchResult,
    name: str,
) -> MeasuredBatch:
    """Returns the report's row of a batch."""
    best = result.plans[name]
    loop = result.plans.get(result.loop)
    return MeasuredBatch(
        entry=entry.name,
        pattern=pattern,
        batch=batch,
        classes=classes,
        chosen=name,
        backend=best.backend,
        strategies=dict(Counter(best.used.values())),
        ms=result.times_ms[name],
        predicted=result.plans[PREDICTED].cost / best.cost if PREDICTED in result.plans else None,
        loop=loop.cost / best.cost if loop is not None else None,
        times_ms=result.times_ms,
        noise=round(result.noise, 3),
        changes=tuple(result.changes),
        dropped=dict(result.dropped),
    )
