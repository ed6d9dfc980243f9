"""One row of `bench --primitive`: a layer, N members of it, every strategy beside the baselines.

1. All answers are compared with the members' own in float64 (`right.py`): a strategy that is wrong is an error of the row, a baseline that is wrong is skipped.
2. What is far slower than the fastest of its kind after a few calls is not raced: a strategy over `SLOW_STRATEGY` times, a baseline over `SLOW_BASELINE` times. One compiled
   member called N times, which published tables count against, is always raced.
3. The rest runs interleaved (`noise.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from widepack.errors import VerificationError
from widepack_bench.layers.sweeps import Sweep
from widepack.system.timing import LONG_S, WARM_CALLS

from ..measure import race as noise
from ..baselines.table import BASELINES, Run
from .block_sweeps import FAMILY as BLOCK
from ..baselines.compiled import TooLong, at_most, compiler_settings
from ..errors import BenchError
from ..measure.answers import leaves
from .in_memory import AUTO, LOOP, InMemory, Way, inputs, members
from ..report.document import Row
from .reference import Truth
from ..suite.compare import reason
from .tuned import opened, place_of, tuned

COMPILED_MEMBER = "compiled-member"
RULES = "rules"  # the plan by rules of thumb, beside a tuned `auto`
SLOW_STRATEGY, SLOW_BASELINE = 1.25, 1.25
CALLS = 3  # of a contestant, whose shortest decides whether it is raced
LEAST_ROUNDS = 12  # six even ones: fewer have no 95% interval
CHECKED = "checked"
PREPARING = "preparing "  # before a baseline's name: the stage in which a process that dies has died of it
OF = "strategy "  # before a strategy's name in a race, where the eager loop is a contestant, too
Said = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Effort:
    """What a row may take. baselines: by name. budget_s: of racing. rounds: at least; 0 for a few that judge nothing. compile_limit_s: of each baseline."""

    baselines: tuple[str, ...]
    budget_s: float
    rounds: int
    compile_limit_s: float
    row_s: float  # what a row takes in all, roughly

    @classmethod
    def of(cls, preset: str) -> Effort:
        every = tuple(name for name in BASELINES if name != "cuda-graph-loop" or torch.cuda.is_available())
        return {
            "ci": cls(("loop", "vmap"), 0.05, 0, 10.0, 2.0),
            "quick": cls(every, 1.0, LEAST_ROUNDS, 60.0, 15.0),
            "full": cls(every, 4.0, LEAST_ROUNDS, 60.0, 20.0),
        }[preset]


def run_row(
    sweep: Sweep,
    count: int,
    preset: str,
    *,
    baselines: Sequence[str] = (),
    pattern: str = "each",
    device: str = "cpu",
    threads: int | None = None,
    pin: bool = False,
    budget_s: float | None = None,
    compiled: bool = False,
    artifacts: str = "",
    said: Said = lambda stage: None,
) -> dict[str, Any]:
    """One row, as JSON values. baselines, budget_s: others than the preset's. compiled: the wide program under `torch.compile` as a strategy too. said: told each stage.

    artifacts: a folder for tuned artifacts, in which earlier ones are found: `auto` is an artifact of these members then, tuned here and loaded, and the plan by rules of thumb a strategy,
    `rules`; without it `auto` is the plan by rules of thumb.

    Raises: VerificationError where a strategy is wrong; BenchError where no baseline runs; what capturing and lowering raise.
    """
    effort = Effort.of(preset)
    each = pattern == "each"
    shape = sweep.at(preset)
    begun = time.perf_counter()
    with noise.quiet(threads, pin), compiler_settings(), torch.inference_mode():
        torch._dynamo.reset()
        with torch.inference_mode(False):
            given = inputs(shape.inputs, shape.batch, count)
            modules = members(lambda: sweep.make(preset), count)
            said("members alone in float64")
            truth = Truth.of(modules, given, each)
            said("lowering")
            wide = InMemory(lambda: sweep.make(preset), modules, shape.inputs, given, each, device)
            # in a network of many ops the strategies of each would be hundreds of programs
            ways, refused = wide.ways(() if sweep.family == BLOCK else None)
            ways += [wide.compiled()] if compiled else []
            chosen: dict[str, Any] = {}
            if artifacts:
                place = place_of(artifacts, sweep.name, count)
                chosen = tuned(lambda: sweep.make(preset), modules, shape.inputs, shape.batch, place, pattern=pattern, device=device, said=said)
                ways = [opened(place, chosen, pattern=pattern, device=device), replace(ways[0], name=RULES), *ways[1:]]
        args = [v.to(device) if each else v[0].to(device) for v in given]
        modules = [m.to(device) for m in modules]
        auto = _fill(ways, args, truth, refused)
        runs, skipped = _baselines(baselines or effort.baselines, modules, each, args, truth, effort.compile_limit_s, said)
        if not runs:
            raise BenchError(f"no baseline runs: {'; '.join(f'{k}: {v}' for k, v in skipped.items())}")
        said("measuring")
        field = Field.of(
            {w.name: w.run for w in ways if w.name not in refused}, runs, args, torch.cuda.synchronize if device.startswith("cuda") else None
        )
        race = field.race(budget_s or effort.budget_s, effort.rounds)
    row = Row.of(shape.batch, {}, race, skipped, count)
    if not effort.rounds:
        row = replace(row, verdict=CHECKED, why="the answers are right; times of so small a shape, and of so few calls, say nothing")
    strategies = field.strategies(race, row.fastest, ways, refused)
    far = {n: field.far(n) for n in field.baselines if n not in field.against}
    found = {k: v for k, v in row.to_json().items() if k not in ("sizes", "others", "memory", "roofline")}
    found["skipped"] = {**skipped, **far}
    found["baselines"] |= {n: {"median_ms": field.alone[n] * 1e3} for n in far}
    return {
        "primitive": sweep.name,
        "members": count,
        "layer": str(modules[0]),
        "inputs": list(shape.inputs),
        "batch": shape.batch,
        "pattern": pattern,
        "auto": ", ".join(auto.used) if artifacts or LOOP not in auto.used else next((s for s in auto.same if s.startswith(LOOP)), LOOP),
        **({"tuned": chosen} if artifacts else {}),
        COMPILED_MEMBER: strategies[AUTO].get(COMPILED_MEMBER),
        "strategies": strategies,
        **found,
        "seconds": time.perf_counter() - begun,
    }


@dataclass(frozen=True, slots=True)
class Field:
    """Who could run in a row's race, and who does.

    ours: strategies, `auto` among them. baselines: the others. took, alone: seconds of the shortest of a few calls of each of ours, of each baseline. sync: waits for the device.
    """

    ours: Mapping[str, noise.Call]
    baselines: Mapping[str, noise.Call]
    took: Mapping[str, float]
    alone: Mapping[str, float]
    sync: noise.Call | None

    @classmethod
    def of(cls, ours: Mapping[str, Run], baselines: Mapping[str, Run], args: Sequence[Any], sync: noise.Call | None) -> Field:
        calls, others = ({name: _bound(run, args) for name, run in runs.items()} for runs in (ours, baselines))
        took, alone = ({name: _shortest(call, sync) for name, call in c.items()} for c in (calls, others))
        return cls(calls, others, took, alone, sync)

    @property
    def raced(self) -> dict[str, noise.Call]:
        """The strategies beside `auto` that are not far slower than the fastest."""
        return {n: c for n, c in self.ours.items() if n != AUTO and self.took[n] <= SLOW_STRATEGY * min(self.took.values())}

    @property
    def against(self) -> dict[str, noise.Call]:
        """The baselines that are not, and the one that published tables count against."""
        return {n: c for n, c in self.baselines.items() if n == COMPILED_MEMBER or self.alone[n] <= SLOW_BASELINE * min(self.alone.values())}

    def far(self, baseline: str) -> str:
        """Why a baseline was not raced."""
        return f"not raced: {self.alone[baseline] / min(self.alone.values()):.1f} times as long as the fastest baseline"

    def race(self, budget_s: float, rounds: int) -> noise.Race:
        """All of them interleaved. rounds: at least; 0 for a few that judge nothing."""
        raced, against = self.raced, self.against
        once = sum(_sample(self.took[n]) for n in raced) + 2 * _sample(self.took[AUTO]) + sum(_sample(self.alone[n]) for n in against)
        return noise.race(
            self.ours[AUTO],
            against,
            others={OF + n: c for n, c in raced.items()},
            budget_s=max(budget_s, once * rounds / 2),  # the race ends at three times its budget
            min_rounds=max(rounds, 2),
            sync=self.sync,
        )

    def strategies(self, race: noise.Race, fastest: str, ways: Sequence[Way], refused: Mapping[str, str]) -> dict[str, Any]:
        """Of each strategy what it is, and its times and ratios, or why it has none."""
        found: dict[str, Any] = {w.name: {"used": list(w.used), "same": list(w.same)} for w in ways}
        for name, why in refused.items():
            found.setdefault(name, {})["skipped"] = why
        raced, against = self.raced, self.against
        for name, took in self.took.items():
            if name in raced or name == AUTO:
                ours = noise.OURS if name == AUTO else OF + name
                found[name] |= {"median_ms": race.median_ms(ours), "ratio": race.ratio(fastest, ours).to_json(), "verdict": race.verdict_of(ours)}
                if COMPILED_MEMBER in against:
                    found[name][COMPILED_MEMBER] = race.ratio(COMPILED_MEMBER, ours).to_json()
            else:
                ratio = {"value": min(self.alone.values()) / took, "low": None, "high": None}
                found[name] |= {"median_ms": took * 1e3, "ratio": ratio, "verdict": "slower"}
                found[name]["skipped"] = f"not raced: {took / min(self.took.values()):.1f} times as long as the fastest strategy"
        return found


def _fill(ways: Sequence[Way], args: Sequence[Any], truth: Truth, refused: dict[str, str]) -> Way:
    """Run every strategy once; `auto`'s way. Raises: VerificationError for wrong answers."""
    for way in ways:
        try:
            answer = way.run(*args)
        except Exception as error:  # one that does not run here (a kernel that is missing) is a result
            if way.name == AUTO:
                raise
            refused[way.name] = reason(error)
            continue
        if wrong := truth.wrong(answer):
            raise VerificationError(f"strategy {way.name} ({', '.join(way.used)}) does not give the members' answers: {wrong}")
    return ways[0]


def _baselines(
    names: Sequence[str], modules: Sequence[Any], each: bool, args: Sequence[Any], truth: Truth, limit_s: float, said: Said
) -> tuple[Mapping[str, Run], dict[str, str]]:
    """The baselines that run and answer rightly, and why others do not."""
    found: dict[str, Run] = {}
    skipped: dict[str, str] = {}
    for name in names:
        said(f"{PREPARING}{name}")
        try:
            with at_most(limit_s):
                run = BASELINES[name](modules, each)
                wrong = truth.wrong(answer := run(*args))
                wrong = f"its answers are not the members': {wrong}" if wrong else _borrowed(answer, args)
                run(*args)
        except (Exception, TooLong) as error:  # noqa: BLE001  # compilers fail in their own ways, and that is a result
            skipped[name] = reason(error)
            continue
        if wrong:
            skipped[name] = wrong
        else:
            found[name] = run
    return found, skipped


def _borrowed(answer: Any, args: Sequence[Any]) -> str:
    """Why an answer is of another form than the loop's and ours, whose memory is the caller's own: it lies in an input's. Empty where it does not."""
    given = {v.untyped_storage().data_ptr() for v in leaves(args) if v.numel()}
    lent = any(v.untyped_storage().data_ptr() in given for v in leaves(answer))
    return "another output form: it answers with the memory of its input, the others with memory that is the caller's" if lent else ""


def _bound(run: Run, args: Sequence[Any]) -> noise.Call:
    return lambda: run(*args)


def _sample(seconds: float) -> float:
    """How long a race takes for one sample of calls that take so many seconds (`noise.race`)."""
    if seconds > LONG_S:
        return seconds
    return min(WARM_CALLS * seconds, LONG_S + seconds) + (3 * seconds if seconds > 0.001 else 0.006)


def _shortest(call: noise.Call, sync: noise.Call | None) -> float:
    """Seconds of the shortest of a few calls."""
    wait = sync or (lambda: None)
    best = math.inf
    for _ in range(CALLS):
        wait()
        begin = time.perf_counter()
        call()
        wait()
        best = min(best, time.perf_counter() - begin)
    return best
