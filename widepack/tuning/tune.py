"""Tunes an artifact: chooses its plans by measurement on this machine, and stores them in the user's cache or
the artifact.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from os import PathLike, fspath

import torch

from widepack_artifacts.opset import EXTRA
from widepack_artifacts.writer import Writer

from ..errors import UsageError
from ..inference.load import load
from ..inference.model import WideModel
from ..ir.random_ops import uses_random_ops
from ..planning import plan_cache
from ..planning.plan import for_size
from ..runtime.admission import guarded
from ..spec.entries import PATTERNS
from ..system.autocast import plain_modes
from ..system.machine import CHOOSABLE, backends_here, name_of
from ..system.progress import Report
from ..system.time_limit import TimeLimit
from .report import TuneReport, publish_plans
from .search import COMPILE_S, Search, SearchOptions
from .searches import searches_of
from .tuned_pattern import TunedPattern, tune_pattern

BATCHES = (1, 8, 32)


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


def measured_again(
    path: str | PathLike[str],
    batch: int,
    *,
    pattern: str = "shared",
    entry: str = "",
    budget_s: float = 20.0,
    device: str | None = None,
    backends: Sequence[str] | None = None,
) -> dict[str, list[float]]:
    """Races the plan that is in use for a batch, as `chosen`, against every candidate.

    It runs in another process than the search. So it shows how far the chosen plan is from the best one.

    Args:
        path, device, backends: As in `tune`.
        batch: The batch.
        pattern: The pattern of inputs.
        entry: The entry. Default: the first one.
        budget_s: Seconds of measuring.

    Returns:
        The seconds of each round, by candidate.

    Raises:
        UsageError: The batch cannot be measured. Other errors are as in `tune`.
    """
    ens = load(path, device=device, backend="eager", allow_ops=tuple(EXTRA))
    wide_entry = ens.entry(entry or next(iter(ens.entries)))
    options = SearchOptions(budget_s, _other_backends(ens, backends))
    searches, refused = searches_of(Search, wide_entry, pattern, [batch], options)
    if not searches:
        raise UsageError(f"batch {batch} cannot be measured: {'; '.join(refused.values())}")
    (search,) = searches.values()
    planned = wide_entry.programs.source.planned(pattern)
    return search.again(for_size(planned, search.scaled, lambda w: w.plan).plan)
