"""What a benchmark has found: rows, a table for a person, a document for a program (bench/README.md describes it)."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .noise import Interval, Race
from .text import columns, duration, plural

FORMAT = "widepack.bench/1"


@dataclass(frozen=True, slots=True)
class Timing:
    """One baseline in one row. ratio: its time over ours, above 1 where ours is faster."""

    name: str
    median_ms: float
    ratio: Interval


@dataclass(frozen=True, slots=True)
class Row:
    """One batch.

    fastest: the baseline that the verdict is about; skipped: baseline -> why it was not run; verdict: holds, slower, unclear or noisy.
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

    @classmethod
    def of(cls, batch: int, sizes: dict[str, int], race: Race, skipped: dict[str, str]) -> Row:
        """The row of a race."""
        fastest = race.fastest
        timings = tuple(Timing(n, race.median_ms(n), race.ratio(n)) for n in race.baselines)
        ours = race.median_ms(race.names[0])
        return cls(batch, sizes, ours, timings, skipped, fastest, race.ratio(fastest), race.noise, len(race.rounds), race.verdict, race.why)

    def to_json(self) -> dict[str, Any]:
        return {
            "batch": self.batch,
            "sizes": self.sizes,
            "median_ms": self.median_ms,
            "baselines": {t.name: {"median_ms": t.median_ms, "ratio": t.ratio.to_json()} for t in self.timings},
            "skipped": self.skipped,
            "fastest": self.fastest,
            "ratio": self.ratio.to_json(),
            "noise": self.noise.to_json(),
            "rounds": self.rounds,
            "verdict": self.verdict,
            "why": self.why,
        }


@dataclass(frozen=True, slots=True)
class Report:
    """A benchmark of one wide model. modules: whose modules the baselines run; entry: the method; environment: device, versions, threads, commit, command."""

    name: str
    members: int
    pattern: str
    modules: str
    rows: tuple[Row, ...]
    refused: dict[int, str] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    entry: str = "forward"

    @property
    def holds(self) -> bool:
        """Whether every batch was measured and none is slower than the fastest baseline."""
        return bool(self.rows) and not self.refused and all(row.verdict == "holds" for row in self.rows)

    @property
    def noisy(self) -> bool:
        return any(row.verdict == "noisy" for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """JSON values; the fields are those of bench/README.md."""
        return {
            "format": FORMAT,
            "name": self.name,
            "members": self.members,
            "entry": self.entry,
            "pattern": self.pattern,
            "modules": self.modules,
            "environment": self.environment,
            "rows": [row.to_json() for row in self.rows],
            "refused": {str(batch): why for batch, why in self.refused.items()},
            "holds": self.holds,
        }

    def table(self) -> str:
        """The report as text: a line a batch, then what a verdict is about."""
        env = self.environment
        who_sees = "every member sees the same inputs" if self.pattern == "shared" else "each member has its own inputs"
        lines = [
            (
                f"{self.name}: {'' if self.entry == 'forward' else f'entry {self.entry}, '}{plural(self.members, 'member')}, {who_sees}; "
                f"{env.get('device', 'unknown device')}, {plural(env.get('threads', 0), 'thread')}, torch {env.get('versions', {}).get('torch', '?')}"
            ),
            f"baselines run {self.modules}; a ratio is a baseline's time over widepack's, with its 95% interval; * is the fastest",
        ]
        names = list(dict.fromkeys(name for row in self.rows for name in (*(t.name for t in row.timings), *row.skipped)))
        sized = any(len(row.sizes) > 1 for row in self.rows)
        head = ["batch", *(["sizes"] if sized else []), "widepack", *(cell for name in names for cell in (name, "")), "A against A", "verdict"]
        body = []
        for row in self.rows:
            cells = [str(row.batch), *([" ".join(f"{k}={v}" for k, v in row.sizes.items())] if sized else []), duration(row.median_ms)]
            for name in names:
                timing = next((t for t in row.timings if t.name == name), None)
                cells += [duration(timing.median_ms), f"{timing.ratio}{'*' if name == row.fastest else ' '}"] if timing else ["skipped", ""]
            body.append([*cells, str(row.noise), row.verdict])
        if body:
            lines += ["", *columns([head, *body])]
        lines += ["", *(f"batch {row.batch}: {row.why}" for row in self.rows)]
        lines += [f"batch {batch}: not measured: {why}" for batch, why in self.refused.items()]
        skipped = dict(item for row in self.rows for item in row.skipped.items())
        lines += [f"{name} was skipped: {why}" for name, why in skipped.items()]
        return "\n".join(lines)


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
    }
    return {
        "device": device_name(device),
        "cpus": os.cpu_count(),
        "system": platform.platform(),
        "versions": versions,
        "threads": threads,
        "commit": commit(),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def device_name(device: str) -> str:
    """`cpu (AMD EPYC)`, `cuda (NVIDIA H200)`."""
    if device.startswith("cuda"):
        import torch

        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{device} ({cpu_name()})"


def cpu_name() -> str:
    """The processor's name as the system has it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


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
