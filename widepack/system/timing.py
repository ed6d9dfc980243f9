"""Times several functions in turns, so that a slow phase of the machine slows all of them.

A round takes one sample of each function, the median of a few blocks of calls, in a changing order. A ratio
is the median over rounds of two times of the same round; the benchmarks use the same rule, with intervals.
Times are in seconds. A call on a CUDA device must wait for it (`waited`): otherwise only the start of its
kernels is timed. Calls that run on the calling thread alone are timed by its processor time (`clock_for`),
which other processes change little.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Call = Callable[[], object]
Clock = Callable[[], float]
BLOCK_S = 1e-3  # the length of a block, so long that the time of the clock itself does not count
BLOCKS = 3  # blocks of a sample
LONG_S = 2e-2  # a call this long does not depend on the former content of the caches
WARM_CALLS = 4  # calls before a sample: a program over megabytes of weights needs them to reach its speed
ROUNDS = 7
LEAST_ROUNDS = 3  # of a race whose time is over
REST_S = 2e-2  # before each turn if ops use several threads: the threads of the turn before spin at first


@contextmanager
def without_gc() -> Iterator[None]:
    """Disables garbage collection in the block."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def rest() -> None:
    """Waits until the threads of the function before sleep; returns at once if ops use one thread."""
    import torch  # not needed to format figures

    if torch.get_num_threads() > 1:
        time.sleep(REST_S)


def waited(call: Call, device: torch.device) -> Call:
    """A call that also waits for a CUDA device, which runs kernels after the call has returned.

    device: of the call. On a CPU this returns the call itself.
    """
    if device.type != "cuda":
        return call
    import torch

    def run() -> object:
        answer = call()
        torch.cuda.synchronize(device)
        return answer

    return run


def clock_for(device: torch.device) -> Clock:
    """The clock for calls on a device: processor time of this thread if torch's ops use one thread on a CPU,
    else wall time.
    """
    import torch

    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time if alone else time.perf_counter


def once(call: Call, calls: int = 1, clock: Clock = time.perf_counter) -> float:
    """The seconds of a call, as the mean over `calls`."""
    start = clock()
    for _ in range(calls):
        call()
    return (clock() - start) / calls


def warm(call: Call, clock: Clock = time.perf_counter, long: float = LONG_S) -> None:
    """Calls a function until the caches contain what it reads, as they do when one model is called
    repeatedly.

    long: units of the clock after which no further call starts.
    """
    end = clock() + long
    for _ in range(WARM_CALLS):
        call()
        if clock() > end:
            return


def race(
    calls: Mapping[str, Call],
    budget_s: float,
    least: int = ROUNDS,
    *,
    limit_s: float = math.inf,
    report: Callable[[int, int], None] | None = None,
    clock: Clock = time.perf_counter,
) -> dict[str, list[float]]:
    """The seconds of a call, by function and round.

    Takes rounds for budget_s seconds, and at least `least` rounds. After limit_s seconds no round begins once
    there are `LEAST_ROUNDS`. report: called with the part of the race that is done, as (percent, 100). clock:
    of the calls; the limits are wall time.
    """
    start = time.perf_counter()
    with without_gc():
        for call in calls.values():
            call()  # the first call is slower
        alone = {name: once(call, clock=clock) for name, call in calls.items()}
        sizes = {name: max(1, round(BLOCK_S / max(t, 1e-7))) for name, t in alone.items()}
        times: dict[str, list[float]] = {name: [] for name in calls}
        names, begin = list(calls), time.perf_counter()
        while True:
            number, spent = len(times[names[0]]), time.perf_counter() - begin
            if number >= least and spent >= budget_s:
                break
            if number >= LEAST_ROUNDS and begin + spent - start >= limit_s:
                break
            if report is not None:
                done = min(number / least, spent / budget_s if budget_s > 0 else 1.0)
                report(round(100 * min(done, 1.0)), 100)
            turn = number % len(names)
            order = names[turn:] + names[:turn]
            for name in order if number // len(names) % 2 == 0 else reversed(order):
                rest()
                if alone[name] < LONG_S:
                    warm(calls[name], long=LONG_S / 2)
                blocks = (
                    BLOCKS if alone[name] < LONG_S / 4 else 1
                )  # keeps a search over many candidates of a few milliseconds short
                times[name].append(
                    statistics.median(once(calls[name], sizes[name], clock) for _ in range(blocks))
                )
    return times


def ratio(times: Mapping[str, list[float]], one: str, other: str) -> float:
    """How many times as long as `other` the function `one` takes: the median over rounds."""
    return statistics.median(a / b for a, b in zip(times[one], times[other]))


def noise(times: Mapping[str, list[float]], one: str, other: str) -> float:
    """How wrong the ratio of two calls may be, as a factor of at least 1; for calls that are equal.

    It is how far their median ratio is from 1, and the interval in which the median of so many rounds lies in
    19 of 20 cases: 1.57 times the distance between the quartiles, over the root of their number (McGill,
    Tukey and Larsen, Variations of box plots, 1978).
    """
    logs = [math.log(a / b) for a, b in zip(times[one], times[other])]
    low, _, high = statistics.quantiles(logs, n=4) if len(logs) > 1 else (0.0, 0.0, 0.0)
    return math.exp(abs(statistics.median(logs)) + 1.57 * (high - low) / math.sqrt(len(logs)))


def fastest(times: Mapping[str, list[float]]) -> str:
    """The function with the smallest median ratio to the first function."""
    first = next(iter(times))
    return min(times, key=lambda name: ratio(times, name, first))
