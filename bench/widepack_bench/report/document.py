"""What a benchmark has found: rows, a table for a person, a document for a program (bench/README.md describes it)."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from ..measure.figures import Memory, Roof, Start
from ..measure.race import OURS, Interval, Latency, Race
from ..text import columns, duration, plural, size

FORMAT = "widepack.bench/1"
OURS_TOO = ("widepack[", "level ", "roofline")  # skipped names that are no baselines
NO_LATENCY = Latency.of(())


@dataclass(frozen=True, slots=True)
class Timing:
    """One baseline in one row. ratio: its time over ours, above 1 where ours is faster."""

    name: str
    median_ms: float
    ratio: Interval
    latency: Latency = NO_LATENCY


@dataclass(frozen=True, slots=True)
class Other:
    """Ours in another way: a backend or a level. ratio: the fastest baseline's time over its; over_ours: its time over that of the row's own."""

    name: str
    median_ms: float
    ratio: Interval
    over_ours: Interval
    verdict: str
    latency: Latency = NO_LATENCY


@dataclass(frozen=True, slots=True)
class Row:
    """One batch.

    fastest: the baseline that the verdict is about; skipped: baseline or backend -> why it was not run; verdict: holds, slower, unclear or noisy.
    members: N. memory: by contestant, a reason where there is none. roof: None where it was not asked for.
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
    def of(cls, batch: int, sizes: dict[str, int], race: Race, skipped: dict[str, str], members: int = 1) -> Row:
        """The row of a race."""
        fastest = race.fastest
        timings = tuple(Timing(n, race.median_ms(n), race.ratio(n), race.latency(n)) for n in race.baselines)
        others = tuple(Other(n, race.median_ms(n), race.ratio(fastest, n), race.ratio(n), race.verdict_of(n), race.latency(n)) for n in race.others)
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
        """Throughput at a time for one call: samples a second, and members' answers a second."""
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
                    "median_ms": o.median_ms,
                    "ratio": o.ratio.to_json(),
                    "over_ours": o.over_ours.to_json(),
                    "verdict": o.verdict,
                    "latency": o.latency.to_json(),
                    "share": self.share(o.median_ms),
                    **self.speed(o.median_ms),
                }
                for o in self.others
            },
            "baselines": {
                t.name: {
                    "median_ms": t.median_ms,
                    "ratio": t.ratio.to_json(),
                    "latency": t.latency.to_json(),
                    "share": self.share(t.median_ms),
                    **self.speed(t.median_ms),
                }
                for t in self.timings
            },
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

    def share(self, median_ms: float) -> float | None:
        """A contestant's share of the roofline: the least time of the wide program's work over its own."""
        return self.roof.floor_ms / median_ms if self.roof else None

    def contestants(self) -> Iterator[tuple[str, float, Latency]]:
        """Name, time of a call in milliseconds, percentiles: ours, ours in other ways, the baselines."""
        yield OURS, self.median_ms, self.latency
        yield from ((o.name, o.median_ms, o.latency) for o in self.others)
        yield from ((t.name, t.median_ms, t.latency) for t in self.timings)


@dataclass(frozen=True, slots=True)
class Report:
    """A benchmark of one wide model.

    modules: whose modules the baselines run; entry: the method; environment: device, versions, threads, commit, command. start: by contestant, a reason where
    there is none; empty where it was not asked for.
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
        """JSON values; the fields are those of bench/README.md and schema.json."""
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
        """The report as text: a line a batch, then what a verdict is about, then a line a contestant."""
        env = self.environment
        who_sees = "every member sees the same inputs" if self.pattern == "shared" else "each member has its own inputs"
        lines = [
            (
                f"{self.name}: {'' if self.entry == 'forward' else f'entry {self.entry}, '}{plural(self.members, 'member')}, {who_sees}; "
                f"{env.get('device', 'unknown device')}, {plural(env.get('threads', 0), 'thread')}, torch {env.get('versions', {}).get('torch', '?')}"
                f"{'' if self.backend == 'auto' else f', backend {self.backend}'}"
            ),
            f"baselines run {self.modules}; a ratio is a baseline's time over widepack's, with its 95% interval; * is the fastest",
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
            dict.fromkeys(name for row in self.rows for name in (*(t.name for t in row.timings), *row.skipped) if not name.startswith(OURS_TOO))
        )
        sized = any(len(row.sizes) > 1 for row in self.rows)
        head = ["batch", *(["sizes"] if sized else []), "widepack", *(cell for name in names for cell in (name, "")), "A against A", "verdict"]
        body = []
        for row in self.rows:
            cells = [str(row.batch), *([" ".join(f"{k}={v}" for k, v in row.sizes.items())] if sized else []), duration(row.median_ms)]
            for name in names:
                timing = next((t for t in row.timings if t.name == name), None)
                cells += [duration(timing.median_ms), f"{timing.ratio}{'*' if name == row.fastest else ' '}"] if timing else ["skipped", ""]
            body.append([*cells, str(row.noise), row.verdict])
        return ["", *columns([head, *body])] if body else []

    def _contestants(self) -> list[str]:
        """Percentiles, throughput and memory; and for ours in other ways their ratios."""
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
            cells = [str(row.batch), name, *(duration(v) for v in (latency.p50_ms, latency.p95_ms, latency.p99_ms))]
            cells += [*(f"{v:,.0f}" for v in row.speed(median).values()), "-" if (share := row.share(median)) is None else f"{share:.0%}"]
            if remembered:
                memory = row.memory.get(name)
                cells += [size(memory.private_bytes), size(memory.mapped_bytes)] if isinstance(memory, Memory) else ["-", "-"]
            other = next((o for o in row.others if o.name == name), None)
            body.append([*cells, f"{other.ratio} {other.verdict}" if other else f"{row.ratio} {row.verdict}" if name == OURS else ""])
        return ["", *columns([head, *body])]

    def _levels(self) -> list[str]:
        """What each level gained over the one before it."""
        lines = []
        for row in self.rows:
            steps = [o for o in row.others if o.name.startswith("level ")]
            said = [
                f"{step.name.removeprefix('level ')} {duration(step.median_ms)}" + (f" ({before.median_ms / step.median_ms:.2f}x)" if before else "")
                for before, step in zip([None, *steps], steps)
            ]
            lines += [f"batch {row.batch}: levels, each with its gain over the one before: {', '.join(said)}"] if said else []
        return lines

    def _start(self) -> list[str]:
        lines = []
        for name, start in self.start.items():
            if isinstance(start, str):
                lines.append(f"start-up of {name}: not measured: {start}")
            else:
                lines.append(
                    f"start-up of {name}: {duration(start.median_ms)} from the start of a process to its first answer, besides the "
                    f"{duration(start.torch_ms)} of `import torch` (median of {start.runs} processes)"
                )
        return ["", *lines] if lines else []


def _roof_lines(row: Row) -> Iterator[str]:
    roof = row.roof
    if roof is None:
        return
    work, ceilings = roof.work, roof.ceilings
    yield (
        f"batch {row.batch}: {roof.share:.0%} of the roofline: {work.flop / 1e6:.4g} MFLOP in {work.kernels} kernels take at least {duration(roof.gemm_ms)} at "
        f"{ceilings.gemm / 1e9:.3g} GFLOP/s, {size(work.least_bytes)} of weights, inputs and outputs at least {duration(roof.stream_ms)} at "
        f"{ceilings.stream / 1e9:.3g} GB/s; the kernels move {size(work.moved_bytes)}"
    )


def environment(device: str, threads: int) -> dict[str, Any]:
    """Where and with what a run was made."""
    import safetensors
    import torch

    import widepack

    versions = {
        "widepack": str(getattr(widepack, "__version__", "")),
        "torch": str(torch.__version__),
        "safetensors": str(safetensors.__version__),
        "python": platform.python_version(),
        **_installed("onnxruntime"),
    }
    return {
        "device": device_name(device),
        "cpus": os.cpu_count(),
        "system": platform.platform(),
        "versions": versions,
        "threads": threads,
        "commit": commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def _installed(name: str) -> dict[str, str]:
    """The version of a package that a baseline needs, where it is there."""
    try:
        return {name: metadata.version(name)}
    except metadata.PackageNotFoundError:
        return {}


def device_name(device: str) -> str:
    """`cpu (AMD EPYC)`, `cuda (NVIDIA H200)`."""
    if device.startswith("cuda"):
        import torch

        return f"{device} ({torch.cuda.get_device_name(device)})"
    from widepack.system.machine import cpu_name

    return f"{device} ({cpu_name()})"


def commit() -> str:
    """The git commit of this source tree, `+` behind it where files have changed; empty outside of one."""
    folder = Path(__file__).resolve().parents[1]
    if folder.name != "bench" or not (folder.parent / ".git").exists():
        return ""  # an installed package: whatever repository is around it is not ours
    try:
        git = ["git", "-C", str(folder)]
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
    return head + ("+" if changed else "")
