"""The plan: region -> strategy, and why. Frozen, JSON in and out; one for each device kind, pattern and batch class.

A region is a connected part of the member program. `wide` regions hold one choice a node; a `loop` region runs member after member.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from ..errors import ArtifactError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Region:
    """nodes: names in the member program. strategy: `wide` or `loop`. because: one sentence."""

    name: str
    strategy: str
    nodes: tuple[str, ...]
    because: str


@dataclass(frozen=True, slots=True)
class Choice:
    """The strategy of one node of a wide region, and why."""

    strategy: str
    because: str


@dataclass(frozen=True, slots=True)
class Plan:
    """batch: the sizes of the first dim that the plan is for, (least, most or None), counted at the example's sizes of the other dims. choices: by node of the member program.

    plain: by rules of thumb, without packed convolutions, since with them the members' answers were not right when the artifact was built.

    Of a plan that was measured: the machine and torch's threads that it was measured with, the batch, the backend that was fastest, how many members
    its loops run at once (0: one after the other), and milliseconds of every candidate at the end."""

    device: str
    pattern: str
    batch: tuple[int, int | None]
    regions: tuple[Region, ...]
    choices: Mapping[str, Choice] = field(default_factory=dict)
    machine: str = ""
    threads: int = 0
    at: int = 0
    backend: str = ""
    workers: int = 0
    times_ms: Mapping[str, float] = field(default_factory=dict)
    plain: bool = False

    def to_json(self) -> dict[str, Any]:
        more = {"machine": self.machine, "threads": self.threads, "at": self.at, "times_ms": dict(self.times_ms)} if self.machine else {}
        if self.backend:
            more["backend"] = self.backend
        if self.workers:
            more["workers"] = self.workers
        if self.plain:
            more["plain"] = True
        return {
            **more,
            "device": self.device,
            "pattern": self.pattern,
            "batch": list(self.batch),
            "regions": [{"name": r.name, "strategy": r.strategy, "nodes": list(r.nodes), "because": r.because} for r in self.regions],
            "choices": {n: [c.strategy, c.because] for n, c in self.choices.items()},
        }

    @classmethod
    def from_json(cls, data: Any) -> Plan:
        """Raises: ArtifactError for what is no plan."""
        try:
            return cls(
                device=str(data["device"]),
                pattern=str(data["pattern"]),
                batch=(int(data["batch"][0]), None if data["batch"][1] is None else int(data["batch"][1])),
                regions=tuple(Region(str(r["name"]), str(r["strategy"]), tuple(map(str, r["nodes"])), str(r["because"])) for r in data["regions"]),
                choices={str(n): Choice(str(c[0]), str(c[1])) for n, c in data["choices"].items()},
                machine=str(data.get("machine", "")),
                threads=int(data.get("threads", 0)),
                at=int(data.get("at", 0)),
                backend=str(data.get("backend", "")),
                workers=int(data.get("workers", 0)),
                times_ms={str(n): float(t) for n, t in data.get("times_ms", {}).items()},
                plain=bool(data.get("plain", False)),
            )
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as e:
            raise ArtifactError(f"plan: {e!r} in what should be a plan; build the artifact again") from e

    def fits(self, size: int | None) -> bool:
        """Whether the plan is for a batch, counted as `scaled` does; any is for None."""
        least, most = self.batch
        return size is None or (least <= size and (most is None or size <= most))

    def looped(self) -> frozenset[str]:
        """The nodes that run in loop regions."""
        return frozenset(n for r in self.regions if r.strategy == "loop" for n in r.nodes)

    def strategies(self) -> dict[str, int]:
        """How many nodes run in each strategy."""
        counts: dict[str, int] = {}
        for region in self.regions:
            if region.strategy == "loop":
                counts["loop"] = counts.get("loop", 0) + len(region.nodes)
        for choice in self.choices.values():
            counts[choice.strategy] = counts.get(choice.strategy, 0) + 1
        return counts


def nearest_threads(rows: Sequence[tuple[T, int]]) -> list[T]:
    """Of what was measured with several numbers of threads: all that was measured with the number nearest to torch's now, the smaller of two."""
    here = torch.get_num_threads()
    best = min((threads for _, threads in rows), key=lambda t: (abs(t - here), t), default=0)
    return [row for row, threads in rows if threads == best]


def scaled(sizes: Mapping[str, int], letter: str, example: Mapping[str, int]) -> int | None:
    """The batch, counted at the example's sizes of the other dims: batch classes are about how much a call has to work on. letter: the batch's dim. None: there is none."""
    if letter not in sizes:
        return None
    size = float(sizes[letter])
    for other, there in example.items():
        if other != letter and other in sizes:
            size *= sizes[other] / max(there, 1)
    return max(1, math.ceil(size))


def for_size(rows: Sequence[T], size: int | None, plan: Callable[[T], Plan]) -> T:
    """What is for a batch: of rows, least batch first, the first whose plan fits it, else the last. plan: of a row."""
    return next((row for row in rows if plan(row).fits(size)), rows[-1])
