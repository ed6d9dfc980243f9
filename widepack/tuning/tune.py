"""`widepack.tune`: an artifact's plans by measurement on this machine, kept in the user's cache or written into the artifact."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from os import PathLike, fspath
from typing import Any

import torch

from widepack_artifacts import guards as guard_forms
from widepack_artifacts import strict_json
from widepack_artifacts.manifest import WideProgram
from widepack_artifacts.opset import EXTRA
from widepack_artifacts.program import Kind, Program, refs
from widepack_artifacts.writer import Reader, Writer

from ..planning import plan_cache
from ..spec.entries import PATTERNS
from ..inference.programs import Wide
from ..errors import UsageError, VerificationError
from ..inference.open_artifact import Running
from ..inference.load import load
from ..system.machine import CHOOSABLE, backends_here, name_of
from ..planning.plan import Plan, for_size
from ..system.progress import Report
from ..lowering.relower import simplified
from ..ir.fake_values import Shapes
from ..ir.at_rest import draws
from ..system.timing import race, ratio
from .search import COMPILE_S, COMPILED, LOOP, RULES, Candidate, Found, Search
from ..inference.entry import WideEntry

BATCHES = (1, 8, 32)
WHERE = "(where)"  # beside the nodes of a program: in which session its weights are held


@dataclass(frozen=True)
class Measured:
    """One batch of one pattern. backend: what runs the plan. strategies: how many nodes run in each. rules, loop: how many times as long the plan by rules of thumb and the eager loop take; None where they do not run."""

    entry: str
    pattern: str
    batch: int
    classes: tuple[int, int | None]
    chosen: str
    backend: str
    strategies: dict[str, int]
    ms: float
    rules: float | None
    loop: float | None
    times_ms: dict[str, float]
    changes: tuple[str, ...] = ()
    dropped: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TuneReport:
    """What was measured. backends: those that could be chosen. refused: `forward, shared, batch 8` -> why it was not. kept: where the plans are. digest: the artifact's, another one where they were written into it."""

    path: str
    machine: str
    threads: int
    backends: tuple[str, ...]
    rows: tuple[Measured, ...]
    refused: dict[str, str]
    kept: str
    digest: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


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
    progress: Report | None = None,
) -> TuneReport:
    """Measure the strategies of an artifact's programs here, on every backend that can run them, and keep the fastest plan of each pattern and batch class.

    batches: sizes to measure at; a class reaches to the geometric middle between two of them. patterns, entries: of which programs; all without them. budget_s:
    seconds of measuring a batch of one pattern, lowering and compiling aside. threads: torch's, for the process. backends: which ones may be chosen, `eager` always
    among them; all that are here without it (`machine.backends_here`). cache: the folder of compiled programs, where what was compiled stays; default as in `load`.
    compile_s: seconds of a batch of one pattern after which no compilation begins.
    write: publish the plans in the artifact, beside those by rules of thumb; without it they go to the user's cache, each pattern's when it is measured. Where this fails or is
    interrupted, what was measured is in the cache. A tuned plan is taken on the machine that it was
    measured on alone, and runs on its backend where the cache has the compiled program.
    Raises: UsageError; ArtifactError; VerificationError where a program is wrong here.
    """
    if not batches or any(isinstance(b, bool) or b < 1 for b in batches):
        raise UsageError(f"batches are whole numbers from 1, got {', '.join(map(str, batches)) or 'none'}")
    if unknown := [p for p in patterns if p not in PATTERNS] or (not patterns and ["(none given)"]):
        raise UsageError(f"unknown pattern {', '.join(map(str, unknown))}; known: {', '.join(PATTERNS)}")
    if unknown := [b for b in backends or () if b not in CHOOSABLE]:
        raise UsageError(
            f"a plan cannot name the backend {', '.join(unknown)}: a measured plan has to run in another process without compiling there, and "
            f"{', '.join(CHOOSABLE)} can; leave the backend out to try all of them that are here"
        )
    ens = load(path, device=device, backend="eager", warmup=False, threads=threads, cache=cache, allow_ops=tuple(EXTRA))
    for name in entries or ens.entries:
        if draws(ens.entry(name).programs.member(0)[0]):
            raise UsageError(
                f"{fspath(path)}: entry {name} draws random numbers at every call, and tune compares the answers of strategies; its plans by rules of thumb stay"
            )
    others = tuple(b for b in dict.fromkeys(backends_here(str(ens.device)) if backends is None else backends) if b != "eager")
    rows: list[Measured] = []
    refused: dict[str, str] = {}
    plans: dict[tuple[str, str], list[tuple[Program, Plan]]] = {}
    where, digest = str(ens.device), ens.manifest.digest

    def keep(name: str, pattern: str) -> str:
        return str(plan_cache.keep(digest, name, pattern, where, plans[name, pattern]).parent)

    kept = fspath(path)
    try:
        for name, pattern in itertools.product(entries or ens.entries, patterns):
            made, found, said = _tuned(ens.entry(name), pattern, sorted(set(batches)), budget_s, others, compile_s, progress)
            refused.update({f"{name}, {pattern}, batch {b}": why for b, why in said.items()})
            rows += found
            if made:
                plans[name, pattern] = made
                kept = kept if write else keep(name, pattern)
        if not plans:
            raise UsageError(f"no batch could be measured: {'; '.join(f'{b}: {why}' for b, why in refused.items())}")
        if write:
            digest = _write(path, where, plans, digest)
    except BaseException:  # an interruption, too: what was measured for minutes stays, in the cache
        if write:
            for name, pattern in plans:
                keep(name, pattern)
        raise
    return TuneReport(fspath(path), name_of(where), torch.get_num_threads(), ("eager", *others), tuple(rows), refused, kept, digest)


def _tuned(
    entry: WideEntry, pattern: str, batches: Sequence[int], budget_s: float, others: Sequence[str], compile_s: float, progress: Report | None
) -> tuple[list[tuple[Program, Plan]], list[Measured], dict[int, str]]:
    """One pattern of one entry: its programs and plans, what was measured, and the batches that were refused."""
    searches, refused = searches_of(entry, pattern, batches, budget_s, others, compile_s, progress)
    found: dict[int, Found] = {}
    for batch, search in searches.items():
        try:
            found[batch] = search.run()
        except VerificationError as e:  # inputs that members do not take at this size, or a program that is wrong there: others may be right
            refused[batch] = str(e)
    if not found:
        return [], [], refused
    measured = {b: searches[b] for b in found}
    chosen = _one_form({b: f.best for b, f in found.items()}, measured, budget_s)
    elsewhere = any(served.best.backend != "eager" for served in chosen.values())
    there = {b: served.best if served.best.backend == "eager" else found[b].on_eager for b, served in chosen.items()}
    on_eager = _one_form(there, measured, budget_s) if elsewhere else chosen
    classes = _classes({b: searches[b].scaled for b in found})  # others than was thought, where a batch was refused
    machine, threads = name_of(str(entry.programs.held.device)), torch.get_num_threads()
    programs: list[tuple[Program, Plan]] = []
    rows: list[Measured] = []
    for batch, served in chosen.items():
        f, best = found[batch], served.best
        if best is not f.best:
            f = replace(f, times_ms={**f.times_ms, **served.times_ms}, against_rules=served.rules, against_loop=served.loop, changes=[])
        strategies: dict[str, int] = {}
        for s in best.used.values():
            strategies[s] = strategies.get(s, 0) + 1
        # behind a plan for another backend, what runs where that is not there: no compiled program in the cache, no package
        second = [on_eager[batch].best] if best.backend != "eager" else []
        for c in (best, *second):
            programs.append((c.program, replace(c.plan, batch=classes[batch], machine=machine, threads=threads, times_ms=f.times_ms)))
        rows.append(
            Measured(
                entry.name,
                pattern,
                batch,
                classes[batch],
                best.name,
                best.backend,
                strategies,
                f.times_ms.get(best.name, 0.0) or _alone(searches[batch], best),
                f.against_rules,
                f.against_loop,
                f.times_ms,
                tuple(f.changes),
                f.dropped,
            )
        )
    return programs, rows, refused


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
    """The plan that is in use here for a batch, as `chosen`, beside every candidate there is, in one race: seconds a call, round by round.

    What a plan costs against the best that could have been chosen is asked of another process than the one that chose it. Raises: as `tune`; UsageError for a batch
    that cannot be measured.
    """
    ens = load(path, device=device, backend="eager", allow_ops=tuple(EXTRA))
    one = ens.entry(entry or next(iter(ens.entries)))
    others = tuple(b for b in (backends_here(str(ens.device)) if backends is None else backends) if b != "eager")
    searches, refused = searches_of(one, pattern, [batch], budget_s, others)
    if not searches:
        raise UsageError(f"batch {batch} cannot be measured: {'; '.join(refused.values())}")
    (search,) = searches.values()
    return search.again(for_size(one.programs.planned(pattern), search.scaled, lambda w: w.plan).plan)


def searches_of(
    entry: WideEntry,
    pattern: str,
    batches: Sequence[int],
    budget_s: float,
    others: Sequence[str] = (),
    compile_s: float = COMPILE_S,
    progress: Report | None = None,
) -> tuple[dict[int, Search], dict[int, str]]:
    """A search for each batch of a pattern, none of them begun, and why other batches have none. others: backends beside `eager`."""
    programs = entry.programs
    held, letter = programs.held, programs.letter
    manifest = held.manifest
    weights: dict[str, Kind] = {w.name: w.kind for w in manifest.weights}  # type: ignore[misc]
    own = [p == "e" or i in programs.binder.carried for i, p in enumerate(programs.letters(pattern))]
    example = programs.example
    simple = simplified([held.reader.program(f) for f in entry.entry.member], entry.entry.signatures, weights, own, example)
    refused: dict[int, str] = {}
    sizes_of: dict[int, dict[str, int]] = {}
    for batch in batches if letter else (1,):
        sizes = {**example, letter: batch} if letter else example
        if why := _refusal(entry, sizes):
            refused[batch] = why
        else:
            sizes_of[batch] = sizes

    def bind(program: Program, plan: Plan) -> Any:
        return programs.bind(pattern, Wide(program, plan), Running(plan.backend or "eager", True, held.running.cache, most_nodes=COMPILED))

    searches: dict[int, Search] = {}
    shapes = Shapes(example)
    for batch, sizes in sizes_of.items():
        inputs = programs.probing.drawn(pattern, sizes)
        said = _said(progress, f"{entry.name} {pattern} {letter} = {batch}" if letter else f"{entry.name} {pattern}")
        searches[batch] = Search(
            simple,
            sizes,
            letter,
            held.device,
            pattern,
            bind,
            inputs,
            _Right(entry, pattern, inputs),
            example=example,
            budget_s=budget_s,
            backends=others,
            compile_s=compile_s,
            shapes=shapes,
            plain=programs.plain,
            report=said,
        )
    for batch, classes in _classes({b: s.scaled for b, s in searches.items()}).items():
        searches[batch].classes = classes
    return searches, refused


class _Right:
    """Whether a bound program is right: the artifact's probe, the bounds of its build, and the answers of the first program that was asked at the batch that is measured.

    The probe allows for another device; a plan that is chosen here is held to what a build holds its own to, where the plan by rules of thumb, which a build has verified, keeps that here.
    """

    def __init__(self, entry: WideEntry, pattern: str, inputs: Sequence[torch.Tensor]) -> None:
        self.entry, self.pattern, self.inputs = entry, pattern, inputs
        self._first: Any = None
        self._holds = False

    def __call__(self, bound: Any) -> str:
        try:
            beyond = self.entry.programs.probe(self.pattern, [bound], again=True)
        except VerificationError as e:
            return str(e)
        found = bound.run(*self.inputs)
        if self._first is None:  # the rules of thumb's, which were verified when the artifact was built
            self._first, self._holds = found, not beyond
            return ""
        if self._holds and beyond:
            return beyond
        return self.entry.programs.differ(self.pattern, bound.program, found, self._first)


def _refusal(entry: WideEntry, sizes: Mapping[str, int]) -> str:
    """Why the entry does not take these sizes; empty where it does."""
    for d, n in sizes.items():
        dim = entry.entry.dims[d]
        if n < dim.min or (dim.max is not None and n > dim.max):
            return f"{d} = {n}; the model holds for {dim.min} <= {d}{f' <= {dim.max}' if dim.max is not None else ''}"
    broken = next((g for g in entry.entry.guards if not guard_forms.holds(g.expr, sizes)), None)
    return f"the model holds where {guard_forms.text(broken.expr)}" if broken else ""


def _said(progress: Report | None, what: str) -> Callable[[str, int, int], None] | None:
    return None if progress is None else lambda stage, done, total: progress(f"{what}: {stage}", done, total)


def _classes(sizes: Mapping[int, int]) -> dict[int, tuple[int, int | None]]:
    """For each measured batch its class: up to the geometric middle to the next. sizes: the batch, counted at the example's sizes of the other dims."""
    order = sorted(sizes, key=lambda b: sizes[b])
    ends: list[int | None] = [math.isqrt(sizes[a] * sizes[b]) for a, b in itertools.pairwise(order)]
    starts = [1, *[e + 1 for e in ends if e is not None]]
    return {b: (start, end) for b, start, end in zip(order, starts, [*ends, None])}


@dataclass(frozen=True)
class Served:
    """What serves a batch. times_ms, rules, loop: as in `Measured`, where it is another plan than the search's best, and was measured beside those again."""

    best: Candidate
    times_ms: dict[str, float] = field(default_factory=dict)
    rules: float | None = None
    loop: float | None = None


def _one_form(best: dict[int, Candidate], searches: Mapping[int, Search], budget_s: float) -> dict[int, Served]:
    """The plans of all batch classes with one form of each weight beside the mapped one: weights in two packed orders would be in memory twice.

    Where the classes' own bests differ in that, one plan serves all classes, but for those that the loop serves best: the one with the least time over all batches.
    """
    forms = {b: _forms(searches[b], c) for b, c in best.items()}
    wide = {b: c for b, c in best.items() if forms[b]}
    held: dict[str, set[str]] = {}
    for found in forms.values():
        for node, strategy in found.items():
            held.setdefault(node, set()).add(strategy)
    if all(len(s) == 1 for s in held.values()):
        return {b: Served(c) for b, c in best.items()}
    totals: dict[int, float] = {}
    served: dict[int, dict[int, Served]] = {}
    for of, leader in wide.items():
        totals[of], served[of] = 0.0, {}
        for b, search in searches.items():
            mine = leader if b == of else search.candidate(f"as at {of}", leader.plan)
            mine = mine if mine is not None and search.is_right(search.bound(mine)) else None
            rules, loop = search.named(RULES), search.named(LOOP)
            held_alike = {"rules": rules} if rules is not None and _forms(search, rules) in ({}, forms[of]) else {}
            runs: dict[str, Candidate] = {k: c for k, c in {"mine": mine, **held_alike, "loop": loop}.items() if c is not None}
            calls = {k: search.call(c) for k, c in {**runs, "best": search.bound(best[b])}.items()}
            if rules is not None:
                calls["(rules)"] = search.call(rules)
            times = race(calls, budget_s / 20)
            if not runs:
                served[of][b] = Served(best[b])
                totals[of] = math.inf
                continue
            use = min(runs, key=lambda k: ratio(times, k, "best"))
            against = {k: ratio(times, k, use) for k in ("(rules)", "loop") if k in times}
            ms = {c.name: 1e3 * sorted(times[k])[len(times[k]) // 2] for k, c in runs.items()}
            served[of][b] = Served(runs[use], ms, against.get("(rules)"), against.get("loop"))
            totals[of] += math.log(ratio(times, use, "best"))
    chosen = served[min(totals, key=lambda of: totals[of])]
    return {b: Served(c.best) if c.best is best[b] else c for b, c in chosen.items()}


def _alone(search: Search, c: Candidate) -> float:
    """Milliseconds of a candidate that took no part in its batch's race."""
    times = race({c.name: search.call(c)}, 0.0)[c.name]
    return 1e3 * sorted(times)[len(times) // 2]


def _forms(search: Search, c: Candidate) -> dict[str, str]:
    """The strategies of the nodes that read weights, but for those that read them as they are mapped, member by member."""
    looped = c.plan.looped()
    if c.backend == "onnxruntime":  # which packs weights in its own way, in a session for each program
        return {WHERE: f"{c.name} on onnxruntime"}

    def form(name: str) -> str:
        return (f"{c.plan.choices[name].strategy} in loops" if name in c.plan.choices else "") if name in looped else c.used[name]

    reading = [n.name for n in search.first.nodes if n.name not in search.early and any(r in search.early for r in refs((n.args, n.kwargs)))]
    found = {name: form(name) for name in reading if form(name)}
    return {**found, WHERE: ""} if found else {}


def _write(path: str | PathLike[str], device: str, plans: Mapping[tuple[str, str], Sequence[tuple[Program, Plan]]], digest: str) -> str:
    """Publish measured programs in the artifact of this digest, in the place of earlier ones of this machine and number of threads. Returns: the new digest.

    Raises: ArtifactError where another artifact was published meanwhile.
    """
    with Writer(path, force=True) as writer:
        reader = Reader(path, digest)  # under the lock: nobody publishes in between
        writer.keep(reader.manifest.files)
        entries = dict(reader.manifest.entries)
        kind, here = device.partition(":")[0], name_of(device)
        for (name, pattern), rows in plans.items():
            threads = {plan.threads for _, plan in rows}
            kept = [
                w
                for w in entries[name].wide
                if (w.pattern, w.device, w.plan.get("machine", "")) != (pattern, kind, here) or w.plan.get("threads") not in threads
            ]
            for program, plan in rows:
                file = writer.file(f"programs/{kind}.{name}.{pattern}", "json", strict_json.canonical(program.to_json()))
                kept.append(WideProgram(kind, pattern, file, plan.batch, plan.to_json()))
            entries[name] = replace(entries[name], wide=tuple(kept))
        used = {w.file for e in entries.values() for w in e.wide}
        gone = {w.file for e in reader.manifest.entries.values() for w in e.wide} - used
        for file in gone:
            writer.files.pop(file, None)
        return writer.publish(replace(reader.manifest, entries=entries)).digest
