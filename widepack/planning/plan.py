"""Defines the plan: the strategy of each region and node, with its reason.

There is one plan for each device kind, pattern and batch class. A plan is frozen, and is read from and
written to JSON. A region is a connected part of the member program. A `wide` region has one choice for each
node; a `loop` region runs member after member.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from ..errors import ArtifactError
from ..system.machine import name_of

T = TypeVar("T")
REQUESTED = "requested"
MEMBERS = "members"
"""The name of the region of the loop around all that differs between members."""
LOOP = "loop"
"""The name of the plan with that loop, among those that were measured (`times_ms`)."""


def name_on(origin: str, backend: str) -> str:
    """Returns the name of a measured plan on another backend than `eager`. origin: its name on `eager`."""
    return f"{origin} on {backend}"


@dataclass(frozen=True, slots=True)
class Region:
    """A connected part of the member program, as names of nodes.

    `strategy` is `wide` or `loop`. `because` is the reason, one sentence for people.
    """

    name: str
    strategy: str
    nodes: tuple[str, ...]
    because: str


@dataclass(frozen=True, slots=True)
class NodeChoice:
    """The strategy of one node of a wide region.

    `because` is the reason, one sentence for people. `requested` says whether the user named the strategy.
    `first` says whether lowering takes this strategy without the choice, on every kind of device; it is not
    stored.
    """

    strategy: str
    because: str
    requested: bool = False
    first: bool = field(default=False, compare=False)

    @classmethod
    def by_user(cls, strategy: str) -> NodeChoice:
        """Returns the choice of a strategy that the user named."""
        return cls(strategy, REQUESTED, requested=True)

    @classmethod
    def from_json(cls, data: Any) -> NodeChoice:
        """Reads `[strategy, because]`. In JSON the reason alone says that the user named the strategy."""
        strategy, because = str(data[0]), str(data[1])
        return cls(strategy, because, requested=because == REQUESTED)


@dataclass(frozen=True, slots=True)
class Plan:
    """The strategies of one device kind, pattern and batch class.

    batch: the batch class (least, most or None), counted at the example sizes of the other dims. regions: the
    regions of the member program. choices: the strategies of nodes of wide regions, by node. machine,
    threads, at: for a measured plan, the machine, the number of torch's threads and the batch of the
    measurement. backend: for a measured plan, the fastest backend. workers: the number of members that a loop
    runs in parallel; 0 means one after the other. times_ms: for a measured plan, the milliseconds of every
    candidate at the end. plain: the plan has no packed weights, because those gave wrong answers in the
    build. predicted: for a plan by predicted times, the machine whose kernel times they rest on.
    """

    device: str
    pattern: str
    batch: tuple[int, int | None]
    regions: tuple[Region, ...]
    choices: Mapping[str, NodeChoice] = field(default_factory=dict)
    machine: str = ""
    threads: int = 0
    at: int = 0
    backend: str = ""
    workers: int = 0
    times_ms: Mapping[str, float] = field(default_factory=dict)
    plain: bool = False
    predicted: str = ""

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as JSON values."""
        more = (
            {"machine": self.machine, "threads": self.threads, "at": self.at, "times_ms": dict(self.times_ms)}
            if self.machine
            else {}
        )
        if self.backend:
            more["backend"] = self.backend
        if self.workers:
            more["workers"] = self.workers
        if self.plain:
            more["plain"] = True
        if self.predicted:
            more["predicted"] = self.predicted
        return {
            **more,
            "device": self.device,
            "pattern": self.pattern,
            "batch": list(self.batch),
            "regions": [
                {"name": r.name, "strategy": r.strategy, "nodes": list(r.nodes), "because": r.because}
                for r in self.regions
            ],
            "choices": {n: [c.strategy, c.because] for n, c in self.choices.items()},
        }

    @classmethod
    def from_json(cls, data: Any) -> Plan:
        """Reads a plan. Raises: ArtifactError if the data is not a plan."""
        try:
            return cls(
                device=str(data["device"]),
                pattern=str(data["pattern"]),
                batch=(int(data["batch"][0]), None if data["batch"][1] is None else int(data["batch"][1])),
                regions=tuple(
                    Region(str(r["name"]), str(r["strategy"]), tuple(map(str, r["nodes"])), str(r["because"]))
                    for r in data["regions"]
                ),
                choices={str(n): NodeChoice.from_json(c) for n, c in data["choices"].items()},
                machine=str(data.get("machine", "")),
                threads=int(data.get("threads", 0)),
                at=int(data.get("at", 0)),
                backend=str(data.get("backend", "")),
                workers=int(data.get("workers", 0)),
                times_ms={str(n): float(t) for n, t in data.get("times_ms", {}).items()},
                plain=bool(data.get("plain", False)),
                predicted=str(data.get("predicted", "")),
            )
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as e:
            raise ArtifactError(f"plan: {e!r}; the data is not a plan. Build the artifact again") from e

    def fits(self, size: int | None) -> bool:
        """Returns whether the plan serves a batch, counted as `scaled` does. Every plan serves None."""
        least, most = self.batch
        return size is None or (least <= size and (most is None or size <= most))

    def looped(self) -> frozenset[str]:
        """Returns the nodes that run in loop regions."""
        return frozenset(n for r in self.regions if r.strategy == "loop" for n in r.nodes)

    @property
    def runs_member_after_member(self) -> bool:
        """Whether one loop has all that differs between members."""
        return any(r.name == MEMBERS and r.strategy == "loop" for r in self.regions)

    def strategies(self) -> dict[str, int]:
        """Returns the number of nodes of each strategy."""
        counts: dict[str, int] = {}
        for region in self.regions:
            if region.strategy == "loop":
                counts["loop"] = counts.get("loop", 0) + len(region.nodes)
        for choice in self.choices.values():
            counts[choice.strategy] = counts.get(choice.strategy, 0) + 1
        return counts


def nearest_threads(rows: Sequence[tuple[T, int]]) -> list[T]:
    """Returns the rows that were measured with the number of threads nearest to torch's current number.

    Of two equally near numbers it takes the smaller one.
    """
    current = torch.get_num_threads()
    best = min((threads for _, threads in rows), key=lambda t: (abs(t - current), t), default=0)
    return [row for row, threads in rows if threads == best]


def of_this_machine(rows: Sequence[tuple[T, Plan]], device: str) -> list[tuple[T, Plan]]:
    """Returns the rows of stored plans that serve this machine.

    They are those that were measured here, with the number of threads nearest to torch's current one. If none
    was measured here, they are those that were not measured. `device` is torch's name of the device.
    """
    here = name_of(device) if any(plan.machine for _, plan in rows) else ""
    measured = [((row, plan), plan.threads) for row, plan in rows if plan.machine and plan.machine == here]
    return nearest_threads(measured) or [(row, plan) for row, plan in rows if not plan.machine]


def scaled(sizes: Mapping[str, int], letter: str, example: Mapping[str, int]) -> int | None:
    """Returns the batch that would be as much work at the example sizes of the other dims.

    `letter` is the batch's dim. Returns None if the sizes do not have it.
    """
    if letter not in sizes:
        return None
    size = float(sizes[letter])
    for other, example_size in example.items():
        if other != letter and other in sizes:
            size *= sizes[other] / max(example_size, 1)
    return max(1, math.ceil(size))


def for_size(rows: Sequence[T], size: int | None, plan: Callable[[T], Plan]) -> T:
    """Returns the row for a batch: the first row whose plan serves it, else the last row.

    Rows are sorted by batch, smallest first. `plan` returns the plan of a row.
    """
    return next((row for row in rows if plan(row).fits(size)), rows[-1])
