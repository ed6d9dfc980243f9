"""Describes one batch of a benchmark: times, ratios with intervals, and a verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..measure.figures import Memory, Roof
from ..measure.race import OURS, Interval, Latency, Race

NO_LATENCY = Latency.of(())


@dataclass(frozen=True, slots=True)
class Timing:
    """One baseline in one row. ratio: its time over widepack's, above 1 where widepack is faster."""

    name: str
    median_ms: float
    ratio: Interval
    latency: Latency = NO_LATENCY


@dataclass(frozen=True, slots=True)
class Other:
    """Another way to run widepack: a backend or a level.

    ratio: the fastest baseline's time over its time. over_ours: its time over that of the row's own.
    """

    name: str
    median_ms: float
    ratio: Interval
    over_ours: Interval
    verdict: str
    latency: Latency = NO_LATENCY


@dataclass(frozen=True, slots=True)
class Row:
    """One batch.

    fastest: the baseline that the verdict is about. skipped: baseline or backend -> the reason. verdict:
    holds, slower, unclear or noisy. members: N. memory: by contestant, or the reason where there is none.
    roof: None where it was not requested.
    """

    batch: int
    sizes: dict[str, int]
    median_ms: float
    timings: tuple[Timing, ...]
    skipped: dict[str, str]
    fastest: str
    ratio: Interval
    noise: Interval
    rounds: int
    verdict: str
    why: str
    latency: Latency = NO_LATENCY
    others: tuple[Other, ...] = ()
    members: int = 1
    memory: Mapping[str, Memory | str] = field(default_factory=dict)
    roof: Roof | None = None

    @classmethod
    def of(
        cls, batch: int, sizes: dict[str, int], race: Race, skipped: dict[str, str], members: int = 1
    ) -> Row:
        """Makes the row of a race."""
        fastest = race.fastest
        timings = tuple(Timing(n, race.median_ms(n), race.ratio(n), race.latency(n)) for n in race.baselines)
        ratios = {n: (race.ratio(fastest, n), race.ratio(n), race.verdict_of(n)) for n in race.others}
        others = tuple(Other(n, race.median_ms(n), *r, race.latency(n)) for n, r in ratios.items())
        return cls(
            batch,
            sizes,
            race.median_ms(OURS),
            timings,
            skipped,
            fastest,
            race.ratio(fastest),
            race.noise,
            len(race.rounds),
            race.verdict,
            race.why,
            race.latency(OURS),
            others,
            members,
        )

    def speed(self, median_ms: float) -> dict[str, float]:
        """Returns the throughput for this time of one call: samples and members' answers for each second."""
        samples = self.batch * 1e3 / median_ms
        return {"samples_per_s": samples, "answers_per_s": samples * self.members}

    def to_json(self) -> dict[str, Any]:
        return {
            "batch": self.batch,
            "sizes": self.sizes,
            "median_ms": self.median_ms,
            "latency": self.latency.to_json(),
            **self.speed(self.median_ms),
            "others": {
                o.name: {
                    **self._timed(o),
                    "over_ours": o.over_ours.to_json(),
                    "verdict": o.verdict,
                }
                for o in self.others
            },
            "baselines": {t.name: self._timed(t) for t in self.timings},
            "skipped": self.skipped,
            "fastest": self.fastest,
            "ratio": self.ratio.to_json(),
            "noise": self.noise.to_json(),
            "rounds": self.rounds,
            "verdict": self.verdict,
            "why": self.why,
            "memory": {name: m if isinstance(m, str) else m.to_json() for name, m in self.memory.items()},
            "roofline": self.roof.to_json() if self.roof else None,
        }

    def _timed(self, one: Timing | Other) -> dict[str, Any]:
        return {
            "median_ms": one.median_ms,
            "ratio": one.ratio.to_json(),
            "latency": one.latency.to_json(),
            "share": self.share(one.median_ms),
            **self.speed(one.median_ms),
        }

    def share(self, median_ms: float) -> float | None:
        """Returns a contestant's share of the roofline: the least time of the program's work over its own
        time.
        """
        return self.roof.floor_ms / median_ms if self.roof else None

    def contestants(self) -> Iterator[tuple[str, float, Latency]]:
        """Yields name, milliseconds of a call, and percentiles: of widepack, its other ways, and the
        baselines.
        """
        yield OURS, self.median_ms, self.latency
        yield from ((o.name, o.median_ms, o.latency) for o in self.others)
        yield from ((t.name, t.median_ms, t.latency) for t in self.timings)
