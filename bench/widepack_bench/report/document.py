"""Holds the report of a benchmark, as a table and as a JSON document (described in bench/README.md)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..measure.figures import Memory, Start
from ..measure.race import OURS
from ..text import columns, duration, plural, size
from .row import Row

FORMAT = "widepack.bench/1"
OURS_TOO = ("widepack[", "level ", "roofline")  # Skipped names that are no baselines.


@dataclass(frozen=True, slots=True)
class Report:
    """A benchmark of one wide model.

    modules: whose modules the baselines run. entry: the method. environment: device, versions, threads,
    commit, command. start: start-up by contestant, or the reason where there is none; empty where it was not
    requested.
    """

    name: str
    members: int
    pattern: str
    modules: str
    rows: tuple[Row, ...]
    refused: dict[int, str] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    entry: str = "forward"
    backend: str = "auto"
    start: Mapping[str, Start | str] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Whether every batch was measured and none is slower than the fastest baseline."""
        return bool(self.rows) and not self.refused and all(row.verdict == "holds" for row in self.rows)

    @property
    def noisy(self) -> bool:
        return any(row.verdict == "noisy" for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """Returns JSON values; bench/README.md and schema.json describe the fields."""
        return {
            "format": FORMAT,
            "name": self.name,
            "members": self.members,
            "entry": self.entry,
            "pattern": self.pattern,
            "backend": self.backend,
            "modules": self.modules,
            "environment": self.environment,
            "rows": [row.to_json() for row in self.rows],
            "refused": {str(batch): why for batch, why in self.refused.items()},
            "start_up": {name: s if isinstance(s, str) else s.to_json() for name, s in self.start.items()},
            "holds": self.holds,
        }

    def table(self) -> str:
        """Returns the report as text: a line for each batch, then reasons and notes, then a line for each
        contestant.
        """
        env = self.environment
        who_sees = (
            "every member sees the same inputs"
            if self.pattern == "shared"
            else "each member has its own inputs"
        )
        lines = [
            (
                f"{self.name}: "
                f"{'' if self.entry == 'forward' else f'entry {self.entry}, '}"
                f"{plural(self.members, 'member')}, "
                f"{who_sees}; "
                f"{env.get('device', 'unknown device')}, "
                f"{plural(env.get('threads', 0), 'thread')}, torch "
                f"{env.get('versions', {}).get('torch', '?')}"
                f"{'' if self.backend == 'auto' else f', backend {self.backend}'}"
            ),
            f"baselines run {self.modules}; a ratio is a baseline's time over widepack's, "
            "with its 95% interval; * is the fastest",
        ]
        lines += self._ratios()
        lines += ["", *(f"batch {row.batch}: {row.why}" for row in self.rows)]
        lines += [line for row in self.rows for line in _roof_lines(row)]
        lines += [f"batch {batch}: not measured: {why}" for batch, why in self.refused.items()]
        skipped = dict(item for row in self.rows for item in row.skipped.items())
        lines += [f"{name} was skipped: {why}" for name, why in skipped.items()]
        lines += self._levels()
        lines += self._contestants()
        lines += self._start()
        return "\n".join(lines)

    def _ratios(self) -> list[str]:
        names = list(
            dict.fromkeys(
                name
                for row in self.rows
                for name in (*(t.name for t in row.timings), *row.skipped)
                if not name.startswith(OURS_TOO)
            )
        )
        sized = any(len(row.sizes) > 1 for row in self.rows)
        head = [
            "batch",
            *(["sizes"] if sized else []),
            "widepack",
            *(cell for name in names for cell in (name, "")),
            "A against A",
            "verdict",
        ]
        body = []
        for row in self.rows:
            cells = [
                str(row.batch),
                *([" ".join(f"{k}={v}" for k, v in row.sizes.items())] if sized else []),
                duration(row.median_ms),
            ]
            for name in names:
                timing = next((t for t in row.timings if t.name == name), None)
                cells += (
                    [duration(timing.median_ms), f"{timing.ratio}{'*' if name == row.fastest else ' '}"]
                    if timing
                    else ["skipped", ""]
                )
            body.append([*cells, str(row.noise), row.verdict])
        return ["", *columns([head, *body])] if body else []

    def _contestants(self) -> list[str]:
        """Returns percentiles, throughput and memory of each contestant, and ratios of the other ways to run
        widepack.
        """
        timed = [(row, *c) for row in self.rows for c in row.contestants() if c[2].calls]
        if not timed:
            return []
        remembered = any(row.memory for row in self.rows)
        head = [
            "batch",
            "contestant",
            "p50",
            "p95",
            "p99",
            "samples/s",
            "answers/s",
            "roofline",
            *(["private", "mapped"] if remembered else []),
            "against the fastest",
        ]
        body = []
        for row, name, median, latency in timed:
            cells = [
                str(row.batch),
                name,
                *(duration(v) for v in (latency.p50_ms, latency.p95_ms, latency.p99_ms)),
            ]
            cells += [
                *(f"{v:,.0f}" for v in row.speed(median).values()),
                "-" if (share := row.share(median)) is None else f"{share:.0%}",
            ]
            if remembered:
                memory = row.memory.get(name)
                cells += (
                    [size(memory.private_bytes), size(memory.mapped_bytes)]
                    if isinstance(memory, Memory)
                    else ["-", "-"]
                )
            other = next((o for o in row.others if o.name == name), None)
            body.append(
                [
                    *cells,
                    f"{other.ratio} {other.verdict}"
                    if other
                    else f"{row.ratio} {row.verdict}"
                    if name == OURS
                    else "",
                ]
            )
        return ["", *columns([head, *body])]

    def _levels(self) -> list[str]:
        """Returns the gain of each level over the one before it."""
        lines = []
        for row in self.rows:
            steps = [o for o in row.others if o.name.startswith("level ")]
            gains = [
                f"{step.name.removeprefix('level ')} {duration(step.median_ms)}"
                + (f" ({before.median_ms / step.median_ms:.2f}x)" if before else "")
                for before, step in zip([None, *steps], steps)
            ]
            lines += (
                [f"batch {row.batch}: levels, each with its gain over the one before: {', '.join(gains)}"]
                if gains
                else []
            )
        return lines

    def _start(self) -> list[str]:
        lines = []
        for name, start in self.start.items():
            if isinstance(start, str):
                lines.append(f"start-up of {name}: not measured: {start}")
            else:
                lines.append(
                    f"start-up of {name}: {duration(start.median_ms)} from the start of a process to "
                    "its first answer, besides the "
                    f"{duration(start.torch_ms)} of `import torch` (median of {start.runs} processes)"
                )
        return ["", *lines] if lines else []


def _roof_lines(row: Row) -> Iterator[str]:
    roof = row.roof
    if roof is None:
        return
    work, ceilings = roof.work, roof.ceilings
    yield (
        f"batch {row.batch}: {roof.share:.0%} of the roofline: {work.flop / 1e6:.4g} "
        f"MFLOP in {work.kernels} kernels take at least {duration(roof.gemm_ms)} at "
        f"{ceilings.gemm / 1e9:.3g} GFLOP/s, {size(work.least_bytes)} of weights, inputs "
        f"and outputs at least {duration(roof.stream_ms)} at "
        f"{ceilings.stream / 1e9:.3g} GB/s; the kernels move {size(work.moved_bytes)}"
    )
