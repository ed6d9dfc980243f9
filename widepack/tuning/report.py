"""Defines the report of `widepack.tune`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

TIME_OVER = "the time limit was reached"
"""Words in the reason of a plan that took no part because the time was short."""


@dataclass(frozen=True, kw_only=True)
class MeasuredBatch:
    """The result for one batch of one pattern.

    Attributes:
        entry: The entry.
        pattern: The pattern of inputs.
        batch: The batch that was measured.
        classes: The batch class that the plan serves, (least, most or None).
        chosen: The name of the chosen plan.
        backend: The backend that runs the plan.
        strategies: The number of nodes in each strategy.
        ms: Milliseconds of a call.
        rules: How many times as long the plan by rules of thumb takes; None if it does not run.
        loop: How many times as long the loop takes on `eager`; None if it does not run.
        times_ms: Milliseconds of every plan that was measured.
        changes: Strategies that were changed in the plan because it became faster as a whole.
        dropped: For each plan that took no part, the reason.
    """

    entry: str
    pattern: str
    batch: int
    classes: tuple[int, int | None]
    chosen: str
    backend: str
    strategies: dict[str, int]
    ms: float
    rules: float | None
    loop: float | None
    times_ms: dict[str, float]
    changes: tuple[str, ...] = ()
    dropped: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TuneReport:
    """The result of `widepack.tune`.

    Attributes:
        path: The artifact.
        machine: The machine of the measurement.
        threads: The number of torch's threads.
        backends: The backends that a plan could name.
        rows: One row for each pattern and batch.
        refused: For each batch that was refused, such as `forward, shared, batch 8`, the reason.
        kept: Where the plans are: the artifact, or the folder of the user's cache.
        digest: The digest of the artifact. It is a new one if the plans were written into the artifact.

    Example:
        >>> report = widepack.tune("ens.wide", batches=[1, 8])
        >>> [(row.pattern, row.batch, row.chosen) for row in report.rows]
    """

    __module__ = "widepack"  # pickles name the public place

    path: str
    machine: str
    threads: int
    backends: tuple[str, ...]
    rows: tuple[MeasuredBatch, ...]
    refused: dict[str, str]
    kept: str
    digest: str

    def to_json(self) -> dict[str, Any]:
        """Returns the report as JSON values."""
        return asdict(self)
