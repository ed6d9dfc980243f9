"""Interleaved timing: what is timed together stands in one run, round after round, so that whatever slows the machine down slows all of it.

A round takes a sample of every contestant, the median of a few blocks of calls, in an order that changes; a ratio is the median over rounds of two times in one round (bench/widepack_bench
judges by the same rule, with intervals). Clocks of single calls are in seconds.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

Call = Callable[[], object]
BLOCK_S = 1e-3  # a block lasts about this long, so that the clock's own time does not count
BLOCKS = 3  # of a sample
LONG_S = 2e-2  # of one call: what the caches held before it no longer counts
WARM_CALLS = 4  # before a sample: so many a program over megabytes of weights takes, after another contestant's, until it is as fast as it stays
ROUNDS = 7
REST_S = 2e-2  # before a contestant's turn where ops run on several threads: those of the one before wait for work in a loop at first, on a processor that the next one needs


@contextmanager
def without_gc() -> Iterator[None]:
    """No garbage is collected while something is timed."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def rest() -> None:
    """Wait until the threads of whoever ran before sleep; nothing where ops run on one thread."""
    import torch  # who only formats figures does without it

    if torch.get_num_threads() > 1:
        time.sleep(REST_S)


def once(call: Call, calls: int = 1) -> float:
    """Seconds a call."""
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def warm(call: Call, clock: Callable[[], float] = time.perf_counter, long: float = LONG_S) -> None:
    """Call until the caches hold what this contestant reads, as they do where one model is called again and again, and not what the one before it read.

    long: of the clock's units, after which the calls have been enough."""
    end = clock() + long
    for _ in range(WARM_CALLS):
        call()
        if clock() > end:
            return


def race(calls: Mapping[str, Call], budget_s: float, least: int = ROUNDS) -> dict[str, list[float]]:
    """Seconds a call, by contestant, round by round. Rounds go on for budget_s, at least `least` of them."""
    with without_gc():
        for call in calls.values():
            call()  # the first call pays for what later ones find
        alone = {name: once(call) for name, call in calls.items()}
        sizes = {name: max(1, round(BLOCK_S / max(t, 1e-7))) for name, t in alone.items()}
        times: dict[str, list[float]] = {name: [] for name in calls}
        names, end = list(calls), time.perf_counter() + budget_s
        while len(times[names[0]]) < least or time.perf_counter() < end:
            number = len(times[names[0]])
            turn = number % len(names)
            order = names[turn:] + names[:turn]
            for name in order if number // len(names) % 2 == 0 else reversed(order):
                rest()
                if alone[name] < LONG_S:
                    warm(calls[name], long=LONG_S / 2)
                blocks = BLOCKS if alone[name] < LONG_S / 4 else 1  # many candidates of some milliseconds are not to take longer than a search may
                times[name].append(statistics.median(once(calls[name], sizes[name]) for _ in range(blocks)))
    return times


def ratio(times: Mapping[str, list[float]], one: str, other: str) -> float:
    """How much longer `one` takes than `other`: the median over rounds."""
    return statistics.median(a / b for a, b in zip(times[one], times[other]))


def fastest(times: Mapping[str, list[float]]) -> str:
    """Who takes the least time in the median of the ratios to the first contestant."""
    first = next(iter(times))
    return min(times, key=lambda name: ratio(times, name, first))
