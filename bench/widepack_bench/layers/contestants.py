"""Chooses which strategies and baselines of a layer are timed in full, and times them in one race."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from widepack.system.timing import LONG_S, WARM_CALLS

from ..measure import race as noise
from ..measure.answers import Run
from .in_memory import AUTO, WideContestant

COMPILED_MEMBER = "compiled-member"
SLOW_STRATEGY, SLOW_BASELINE = 1.25, 1.25
CALLS = 3  # Trial calls of each contestant. The shortest decides whether the contestant is raced.
STRATEGY = (
    "strategy "  # Prefix of a strategy's name in a race: the baseline `loop` has a strategy's name, too.
)


@dataclass(frozen=True, slots=True)
class Contestants:
    """The strategies and baselines that can run, with the times of a few trial calls.

    strategies: calls by strategy, `auto` among them. baselines: calls by baseline. strategy_s, baseline_s:
    seconds of the shortest trial call. sync: waits for the device; None on the CPU.
    """

    strategies: Mapping[str, noise.Call]
    baselines: Mapping[str, noise.Call]
    strategy_s: Mapping[str, float]
    baseline_s: Mapping[str, float]
    sync: noise.Call | None

    @classmethod
    def of(
        cls,
        strategies: Mapping[str, Run],
        baselines: Mapping[str, Run],
        args: Sequence[Any],
        sync: noise.Call | None,
    ) -> Contestants:
        """Runs each strategy and baseline a few times with these inputs."""
        strategy_calls, baseline_calls = (
            {name: _bound(run, args) for name, run in runs.items()} for runs in (strategies, baselines)
        )
        strategy_s, baseline_s = (
            {name: shortest(call, sync) for name, call in calls.items()}
            for calls in (strategy_calls, baseline_calls)
        )
        return cls(strategy_calls, baseline_calls, strategy_s, baseline_s, sync)

    @property
    def raced_strategies(self) -> dict[str, noise.Call]:
        """Returns the strategies except `auto` that are not much slower than the fastest one."""
        limit = SLOW_STRATEGY * min(self.strategy_s.values())
        return {n: c for n, c in self.strategies.items() if n != AUTO and self.strategy_s[n] <= limit}

    @property
    def raced_baselines(self) -> dict[str, noise.Call]:
        """Returns the baselines that are not much slower than the fastest, and always `compiled-member`."""
        limit = SLOW_BASELINE * min(self.baseline_s.values())
        return {
            n: c for n, c in self.baselines.items() if n == COMPILED_MEMBER or self.baseline_s[n] <= limit
        }

    def slow_baselines(self) -> dict[str, str]:
        """Returns the baselines that are not raced, each with the reason."""
        fastest, raced = min(self.baseline_s.values()), self.raced_baselines
        return {
            name: f"not raced: {seconds / fastest:.1f} times as long as the fastest baseline"
            for name, seconds in self.baseline_s.items()
            if name not in raced
        }

    def race(self, budget_s: float, rounds: int) -> noise.Race:
        """Times all raced contestants, interleaved.

        rounds: the least number of rounds; 0 for a short race without a verdict.
        """
        strategies, baselines = self.raced_strategies, self.raced_baselines
        round_s = (
            sum(_sample(self.strategy_s[n]) for n in strategies)
            + 2 * _sample(self.strategy_s[AUTO])
            + sum(_sample(self.baseline_s[n]) for n in baselines)
        )
        return noise.race(
            self.strategies[AUTO],
            baselines,
            others={STRATEGY + n: c for n, c in strategies.items()},
            budget_s=max(budget_s, round_s * rounds / 2),  # The race ends at three times its budget.
            min_rounds=max(rounds, 2),
            sync=self.sync,
        )

    def strategies_json(
        self,
        race: noise.Race,
        fastest: str,
        programs: Sequence[WideContestant],
        skipped: Mapping[str, str],
    ) -> dict[str, Any]:
        """Returns for each strategy what it runs, and its times and ratios or the reason why it has none."""
        rows: dict[str, Any] = {p.name: {"used": list(p.used), "same": list(p.same)} for p in programs}
        for name, reason in skipped.items():
            rows.setdefault(name, {})["skipped"] = reason
        raced = {AUTO, *self.raced_strategies}
        for name in self.strategy_s:
            rows[name] |= self._raced_json(race, fastest, name) if name in raced else self._slow_json(name)
        return rows

    def _raced_json(self, race: noise.Race, fastest: str, name: str) -> dict[str, Any]:
        contestant = noise.OURS if name == AUTO else STRATEGY + name
        row: dict[str, Any] = {
            "median_ms": race.median_ms(contestant),
            "ratio": race.ratio(fastest, contestant).to_json(),
            "verdict": race.verdict_of(contestant),
        }
        if COMPILED_MEMBER in self.raced_baselines:
            row[COMPILED_MEMBER] = race.ratio(COMPILED_MEMBER, contestant).to_json()
        return row

    def _slow_json(self, name: str) -> dict[str, Any]:
        seconds, fastest = self.strategy_s[name], min(self.strategy_s.values())
        return {
            "median_ms": seconds * 1e3,
            "ratio": {"value": min(self.baseline_s.values()) / seconds, "low": None, "high": None},
            "verdict": "slower",
            "skipped": f"not raced: {seconds / fastest:.1f} times as long as the fastest strategy",
        }


def _bound(run: Run, args: Sequence[Any]) -> noise.Call:
    return lambda: run(*args)


def _sample(seconds: float) -> float:
    """Estimates how long a race takes for one sample of a call that takes `seconds`."""
    if seconds > LONG_S:
        return seconds
    return min(WARM_CALLS * seconds, LONG_S + seconds) + (3 * seconds if seconds > 0.001 else 0.006)


def shortest(call: noise.Call, sync: noise.Call | None) -> float:
    """Returns the seconds of the shortest of a few calls."""
    wait = sync or (lambda: None)
    best = math.inf
    for _ in range(CALLS):
        wait()
        begin = time.perf_counter()
        call()
        wait()
        best = min(best, time.perf_counter() - begin)
    return best
