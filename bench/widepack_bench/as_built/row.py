"""Times the contestants of a case in rounds, and makes its row."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ..measure.race import BIAS, MIN_ROUNDS, WIDTH, Interval, Race, order
from .contestant import AGAIN, ALTERNATIVES, DIVIDED, LOOP, OURS, SESSIONS
from .networks import NETWORKS
from .stage import Case, Process, Stage

SLOW = (
    2.0  # alternatives and forms that take this many times as long as the fastest leave after three samples
)
LEAST_ROUNDS = 12  # also where the time is over
CLOCKS = {"wall": 0, "cpu": 1}
Ask = Callable[[], tuple[float, float]]
Samples = Mapping[str, Sequence[tuple[float, float]]]
"""Nanoseconds of a call by contestant and round: on the wall, and of the processor."""


def timed(
    ask: Mapping[str, Ask], clock: str, seconds: float
) -> tuple[dict[str, list[tuple[float, float]]], dict[str, float]]:
    """Takes rounds of samples. Returns them, and how many times as long as the fastest those took that left.

    A round takes a sample of each contestant, in changing order. After three samples the slow ones leave.
    Rounds end when the row is known to a tenth, or after three times the seconds.
    """
    begin, which = time.monotonic(), CLOCKS[clock]
    first = {name: min((call(), call(), call()), key=lambda s: s[which]) for name, call in ask.items()}
    fastest = min(s[which] for name, s in first.items() if name in ALTERNATIVES)
    kept = [n for n, s in first.items() if n in (OURS, AGAIN, LOOP) or s[which] < SLOW * fastest]
    slow = {n: s[which] / fastest for n, s in first.items() if n not in kept}
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in kept}
    count = 0
    while count < LEAST_ROUNDS or time.monotonic() - begin < 3 * seconds:
        for place in order(count, len(kept)):
            samples[kept[place]].append(ask[kept[place]]())
        count += 1
        if count >= MIN_ROUNDS and count % 2 == 0 and not doubts(race_of(samples, clock)):
            break
    return samples, slow


def race_of(samples: Samples, clock: str, without: Sequence[str] = ()) -> Race:
    """Returns the rounds by one clock, in the form of a race. without: contestants that are left out."""
    forms = [n for n in samples if n.startswith("load ")]
    others = [n for n in samples if n not in (OURS, AGAIN, *forms, *without)]
    names = (OURS, AGAIN, *forms, *others)
    columns = [[sample[CLOCKS[clock]] for sample in samples[name]] for name in names]
    return Race(names, tuple(zip(*columns)), len(forms))


def doubts(race: Race) -> str:
    """Returns why a ratio is not valid; empty if it is."""
    ratio, noise = race.ratio(race.fastest), race.noise
    if noise.width > WIDTH or noise.low > 1 + BIAS or noise.high < 1 - BIAS:
        return f"the artifact over itself is {noise}"
    return f"the interval of {ratio} is wider than {WIDTH}" if ratio.width > WIDTH else ""


def row_of(case: Case, samples: Samples, clock: str) -> dict[str, Any]:
    """Returns a row with its figures."""
    race = race_of(samples, clock)
    ratio, why = race.ratio(race.fastest), doubts(race)
    fields = {"network": case.network, "batch": case.batch, "threads": case.threads, "call": case.call}
    forms = {n.removeprefix("load "): race.ratio(race.fastest, over=n).value for n in race.others}
    busy = statistics.median(wall / max(cpu, 1.0) for wall, cpu in samples[OURS])
    torch_only = race_of(samples, clock, (SESSIONS, DIVIDED))
    return {
        **fields,
        "members": NETWORKS[case.network].members,
        "clock": clock,
        "valid": not why,
        **({"why": why} if why else {}),
        "fastest": race.fastest,
        "ratio": _json(ratio),
        "over_loop": _json(race.ratio(LOOP)),
        "over_torch": _json(torch_only.ratio(torch_only.fastest)),
        "noise": _json(race.noise),
        "forms": {name: round(value, 3) for name, value in forms.items()},
        "ms": {name: round(race.median_ms(name), 5) for name in race.names},
        "busy": round(busy, 3),
        "rounds": len(race.rounds),
    }


def _json(interval: Interval) -> dict[str, float | None]:
    return {k: None if v is None else round(v, 4) for k, v in interval.to_json().items()}


def measured(case: Case, stage: Stage, clock: str, seconds: float) -> dict[str, Any]:
    """Measures one row."""
    found, left = stage.ready(case)

    def ask(process: Process) -> tuple[float, float]:
        wall, cpu = process.ask()
        return wall, cpu

    samples, slow = timed({name: partial(ask, p) for name, p in found.items()}, clock, seconds)
    return {
        **row_of(case, samples, clock),
        "slow": {n: round(v, 2) for n, v in slow.items()},
        "left_out": left,
    }
