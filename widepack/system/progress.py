"""Reports the stages of long work to a callback: `progress(stage, done, total)`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from .memory import give_back

Report = Callable[[str, int, int], None]
IN_BYTES = frozenset({"write weights"})
"""Stages whose `done` and `total` are bytes."""


class Stages:
    """Times the stages of a build and reports progress. seconds: by stage, in order."""

    def __init__(self, report: Report | None) -> None:
        self.report = report
        self.seconds: dict[str, float] = {}
        self._at = ""

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self._at = name
        start = time.perf_counter()
        self.step(0, 1)
        try:
            yield
        finally:
            give_back()
            self.seconds[name] = round(self.seconds.get(name, 0.0) + time.perf_counter() - start, 3)
        self.step(1, 1)

    def step(self, done: int, total: int) -> None:
        if self.report is not None:
            self.report(self._at, done, total)


@dataclass
class StageClock:
    """Times consecutive stages: `done` ends a stage and starts the next. seconds: by stage."""

    seconds: dict[str, float] = field(default_factory=dict)
    last: float = field(default_factory=time.perf_counter)

    def done(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self.last
        self.last = now
