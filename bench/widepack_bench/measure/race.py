"""Times contestants on a machine that also does other work, and gives ratios with intervals.

How a ratio is measured (DESIGN.md, "Fair means"):

1. A **sample** is the median of a few blocks. A block has as many calls as fit into a millisecond. A
   contestant's sample is its time for one call. A few calls before it are not timed, because the caches hold
   the data of another contestant.
2. A **round** takes one sample of every contestant: other work on the machine slows all of them down. The
   order changes from round to round: each contestant takes each place, and follows each other one, equally
   often (a Williams square).
3. The odd rounds choose the **fastest** baseline. The even rounds measure the **ratio** baseline / widepack:
   random errors of the choice do not count twice.
4. The ratio is the median over rounds of the two times in one round. Its 95% interval comes from order
   statistics (binomial, no distribution assumed). The ratio of the two medians is not used: where a machine
   changes between two speeds, each median can be of another speed.
5. **A against A**: widepack runs twice in every round, under two names. If the interval of this ratio is too
   wide, or excludes 1, the run is refused.
6. Rounds go on until both intervals are narrow enough or the time is over.
7. **Percentiles** are of single calls: inside a block the clock is read after every call. On a device that
   must be waited for, single calls are timed beside the blocks, and blocks keep the device busy.

The contestants are widepack under two names, then `others` (widepack on another backend or level), then the
baselines.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Literal

from widepack.system.timing import LONG_S, rest, warm, without_gc

OURS, AGAIN = "widepack", "widepack again"
WIDTH = 0.1  # A wider interval gives no verdict.
BIAS = 0.02  # A against A may differ from 1 by this much: a systematic difference, not noise.
MIN_ROUNDS = 24
MAX_ROUNDS = 2000
BLOCK_NS = 1_000_000
LONG_NS = round(1e9 * LONG_S)

Verdict = Literal["holds", "slower", "unclear", "noisy"]
Call = Callable[[], object]
Clock = Callable[[], int]


@dataclass(frozen=True, slots=True)
class Interval:
    """A measured value and its 95% interval."""

    value: float
    low: float
    high: float

    @property
    def width(self) -> float:
        """Returns the interval's length; for values above 1 as a share of the value.

        The interval 8.0 [7.8, 8.3] gives a clear verdict; the same length around 1.0 would not.
        """
        return (self.high - self.low) / max(1.0, self.value)

    def __str__(self) -> str:
        if math.isnan(self.value):
            return "-"
        digits = 2 if self.value < 10 else 1
        return f"{self.value:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"

    def to_json(self) -> dict[str, float | None]:
        """Returns three numbers; an end that too few rounds leave open is null."""
        return {
            k: v if math.isfinite(v) else None
            for k, v in (("value", self.value), ("low", self.low), ("high", self.high))
        }


def median_interval(samples: Sequence[float], level: float = 0.95) -> Interval:
    """Returns the median and its distribution-free interval.

    The interval is the k-th smallest and the k-th largest sample, with k from the binomial distribution.
    Fewer than six samples have no 95% interval: it is then open, from 0 to infinity.
    """
    ordered = sorted(samples)
    count = len(ordered)
    value = statistics.median(ordered) if ordered else math.nan
    tail, k = 0.0, 0
    while True:
        tail += math.comb(count, k) / 2**count
        if tail > (1 - level) / 2:
            break
        k += 1
    return Interval(value, ordered[k - 1], ordered[count - k]) if k else Interval(value, 0.0, math.inf)


def order(round_: int, count: int) -> list[int]:
    """Returns the order of `count` contestants in a round: a Williams square, reversed every second time.

    An odd round and the next even round have the same order, which makes the two halves alike.
    """
    step = round_ // 2
    zigzag = [(i + 1) // 2 if i % 2 else (count - i // 2) % count for i in range(count)]
    row = [(place + step) % count for place in zigzag]
    return row[::-1] if step // count % 2 else row


@dataclass(frozen=True, slots=True)
class Latency:
    """Percentiles of single calls in milliseconds (nearest rank: each is the time of a call), and the number
    of calls.
    """

    p50_ms: float
    p95_ms: float
    p99_ms: float
    calls: int

    @classmethod
    def of(cls, times: Sequence[float]) -> Latency:
        """Computes percentiles. times: nanoseconds, sorted."""
        if not times:
            return cls(math.nan, math.nan, math.nan, 0)
        p50, p95, p99 = (
            times[max(0, math.ceil(share * len(times)) - 1)] / 1e6 for share in (0.5, 0.95, 0.99)
        )
        return cls(p50, p95, p99, len(times))

    def to_json(self) -> dict[str, float | int | None]:
        """Returns the fields; a percentile of no calls is null."""
        return {
            k: None if v != v else v
            for k, v in (
                ("p50_ms", self.p50_ms),
                ("p95_ms", self.p95_ms),
                ("p99_ms", self.p99_ms),
                ("calls", self.calls),
            )
        }


@dataclass(frozen=True, slots=True)
class Race:
    """The times of one interleaved run.

    names: the contestants; the first two are widepack under two names. rounds: `[round][contestant]`,
    nanoseconds for one call. extra: how many contestants after those two are widepack, too. calls:
    `[contestant]`, nanoseconds of single calls, sorted; empty where none were timed.
    """

    names: tuple[str, ...]
    rounds: tuple[tuple[float, ...], ...]
    extra: int = 0
    calls: tuple[tuple[float, ...], ...] = ()

    @property
    def others(self) -> tuple[str, ...]:
        return self.names[2 : 2 + self.extra]

    @property
    def baselines(self) -> tuple[str, ...]:
        return self.names[2 + self.extra :]

    def median_ms(self, name: str) -> float:
        """Returns the median time of one call over all rounds, in milliseconds."""
        place = self.names.index(name)
        return statistics.median(row[place] for row in self.rounds) / 1e6

    def ratio(self, name: str, over: str = OURS) -> Interval:
        """Returns a contestant's time over widepack's (or over that of `over`), on the even rounds."""
        place, under = self.names.index(name), self.names.index(over)
        return median_interval([row[place] / row[under] for row in self.rounds[1::2]])

    def latency(self, name: str) -> Latency:
        """Returns the percentiles of a contestant's single calls."""
        return Latency.of(self.calls[self.names.index(name)] if self.calls else ())

    @property
    def fastest(self) -> str:
        """Returns the baseline with the smallest median on the odd rounds."""
        odd = self.rounds[::2]
        return min(self.baselines, key=lambda n: statistics.median(row[self.names.index(n)] for row in odd))

    @property
    def noise(self) -> Interval:
        """Returns the ratio of widepack against itself: A against A."""
        return self.ratio(AGAIN)

    @property
    def quiet(self) -> bool:
        noise = self.noise
        return noise.width < WIDTH and noise.low <= 1 + BIAS and noise.high >= 1 - BIAS

    @property
    def verdict(self) -> Verdict:
        """Returns the verdict: `holds` is not slower than the fastest baseline; `noisy` is refused, whatever
        the ratio is.
        """
        return self.verdict_of(OURS)

    def verdict_of(self, name: str) -> Verdict:
        """Returns the verdict about widepack, or about another way to run it."""
        if not self.quiet:
            return "noisy"
        ratio = self.ratio(self.fastest, name)
        if ratio.high < 1.0:
            return "slower"
        return "holds" if ratio.width < WIDTH else "unclear"

    @property
    def why(self) -> str:
        """Returns the verdict as text, with its numbers."""
        verdict, fastest = self.verdict, self.fastest
        ratio = self.ratio(fastest)
        if verdict == "noisy" and math.isinf(self.noise.high):
            count = len(self.rounds)
            return (
                f"refused: there was time for {count} round{'s' if count > 1 else ''} of all contestants, "
                "too few for an interval; give more time (--budget) or fewer batches and baselines"
            )
        if verdict == "noisy":
            return (
                f"refused: the same program against itself gave {self.noise} in "
                f"{len(self.rounds)} rounds, which must lie around 1 and be "
                f"narrower than {WIDTH}; the machine is too busy (stop what else runs, give fewer "
                "threads or more time)"
            )
        if verdict == "unclear":
            return (
                f"the interval of {ratio} against {fastest} is not narrower than {WIDTH} after "
                f"{len(self.rounds)} rounds; give more time"
            )
        measured = ", ".join(self.baselines)
        return f"{ratio} times as fast as {fastest}, the fastest of the measured baselines ({measured})" + (
            "" if verdict == "holds" else ": slower"
        )


def race(
    ours: Call,
    baselines: Mapping[str, Call],
    *,
    others: Mapping[str, Call] = MappingProxyType({}),
    budget_s: float = 10.0,
    min_rounds: int = MIN_ROUNDS,
    sync: Call | None = None,
    clock: Clock = time.perf_counter_ns,
    limit_s: float = math.inf,
    report: Callable[[int, int], None] | None = None,
) -> Race:
    """Times `ours` (widepack) against every baseline, interleaved.

    others: other ways to run widepack, timed in the same rounds. They are no baselines, and the run does not
    go on to make their intervals narrow. budget_s: seconds after which no new round starts, once `min_rounds`
    are done and the intervals are narrow. No round starts after three times the budget. sync: waits for the
    device; called before the clock is read. limit_s: seconds after which no round starts, however wide the
    intervals are. report: called with the part of the time that is over, as (percent, 100).

    Returns the race in every case; its verdict tells whether its times are valid. Raises: ValueError without
    a baseline.
    """
    if not baselines:
        raise ValueError("a race needs a baseline")
    calls: dict[str, Call] = {OURS: ours, AGAIN: ours, **others, **baselines}
    singles = [Singles() for _ in calls]
    samplers = [
        _sampler(call, sync, clock, single) for call, single in zip(calls.values(), singles, strict=True)
    ]
    rounds: list[tuple[float, ...]] = []
    gc.collect()
    begin, end = clock(), min(3 * budget_s, limit_s)
    if report is not None:
        report(0, 100)  # Also where the first round takes all the time.
    with without_gc():
        while len(rounds) < MAX_ROUNDS:
            times = [0.0] * len(samplers)
            for place in order(len(rounds), len(samplers)):
                times[place] = samplers[place]()
            rounds.append(tuple(times))
            spent = (clock() - begin) / 1e9
            enough = len(rounds) >= min_rounds
            if spent > end:
                break
            if report is not None:
                report(round(100 * spent / end), 100)
            if enough and len(rounds) % 2 == 0:
                so_far = Race(tuple(calls), tuple(rounds), len(others))
                if so_far.quiet and so_far.ratio(so_far.fastest).width < WIDTH:
                    break
    return Race(tuple(calls), tuple(rounds), len(others), tuple(single.sorted() for single in singles))


class Singles:
    """Stores times of single calls, at most `LIMIT` of them, spread evenly over the run.

    At the limit every second time is dropped, and from then on every second new one.
    """

    LIMIT = 50_000

    def __init__(self) -> None:
        self._times = array("d")
        self._step = 1

    def add(self, marks: Sequence[int]) -> None:
        """Adds calls. marks: the clock before the first call, and after each."""
        self._times.extend(float(after - before) for before, after in list(pairwise(marks))[:: self._step])
        while len(self._times) > self.LIMIT:
            self._times = self._times[::2]
            self._step *= 2

    def sorted(self) -> tuple[float, ...]:
        return tuple(sorted(self._times))


def _sampler(call: Call, sync: Call | None, clock: Clock, singles: Singles) -> Callable[[], float]:
    """Returns a function that takes one sample of `call`: nanoseconds for one call."""
    wait = sync or (lambda: None)
    rest()
    once = _warm(call, wait, clock)
    inner = max(1, math.ceil(BLOCK_NS / max(1.0, once)))
    blocks = 5 if once < 1e6 else 3 if once < LONG_NS else 1

    def sample() -> float:
        rest()
        if blocks > 1:
            warm(call, clock, LONG_NS)
        times = []
        for _ in range(blocks):
            wait()
            marks = [clock()]
            for _ in range(inner):
                call()
                if sync is None:
                    marks.append(clock())
            wait()
            times.append((clock() - marks[0]) / inner)
            singles.add(marks)
        if sync is not None:
            for _ in range(min(inner, 4)):
                marks = [clock()]
                call()
                wait()
                singles.add([*marks, clock()])
        return max(1e-3, statistics.median(times))

    return sample


def _warm(call: Call, wait: Call, clock: Clock) -> float:
    """Calls until 50 ms have passed, at least three times. Returns the shortest time in nanoseconds."""
    begin, shortest, count = clock(), math.inf, 0
    while count < 3 or (clock() - begin < 50_000_000 and count < 1000):
        wait()
        start = clock()
        call()
        wait()
        shortest = min(shortest, clock() - start)
        count += 1
    return shortest
