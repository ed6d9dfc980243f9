"""Defines the report of `widepack.tune`, and writes measured plans into an artifact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from os import PathLike
from typing import Any

from widepack_artifacts import strict_json
from widepack_artifacts.entry import Entry
from widepack_artifacts.program import Program
from widepack_artifacts.reader import Reader
from widepack_artifacts.wide_program import WideProgram
from widepack_artifacts.writer import Writer

from ..planning.plan import Plan
from ..system.machine import name_of

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
        predicted: How many times as long the predicted plan takes; None if it does not run.
        loop: How many times as long the loop takes on `eager`; None if it does not run.
        times_ms: Milliseconds of every plan that was measured.
        noise: How far two times of the predicted plan were apart, as a factor: 1 is none.
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
    predicted: float | None
    loop: float | None
    times_ms: dict[str, float]
    noise: float = 1.0
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
        note: What was special in the measurement, as a sentence; else empty.

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
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """Returns the report as a dict that `json.dumps` takes.

        Returns:
            A dict with the fields of the report.

        Example:
            >>> print(json.dumps(report.to_json(), indent=2))
        """
        return asdict(self)


def publish_plans(
    path: str | PathLike[str],
    device: str,
    plans: Mapping[tuple[str, str], Sequence[tuple[Program, Plan]]],
    digest: str,
) -> str:
    """Publishes measured programs in an artifact. They replace those of this machine and number of threads.

    Args:
        path: The artifact.
        device: The device of the measurement.
        plans: For each entry and pattern the wide programs with their plans.
        digest: The digest that the artifact must have.

    Returns:
        The new digest.

    Raises:
        ArtifactError: Another artifact was published in the meantime.
    """
    with Writer(path, force=True) as writer:
        reader = Reader(path, digest)  # the writer has the lock, so the artifact cannot change now
        writer.keep(reader.manifest.files)
        entries = dict(reader.manifest.entries)
        for (name, pattern), rows in plans.items():
            entries[name] = _with_rows(entries[name], name, pattern, device, rows, writer)
        used = {w.file for e in entries.values() for w in e.wide}
        unused = {w.file for e in reader.manifest.entries.values() for w in e.wide} - used
        for file in unused:
            writer.files.pop(file, None)
        return writer.publish(replace(reader.manifest, entries=entries)).digest


def _with_rows(
    entry: Entry, name: str, pattern: str, device: str, rows: Sequence[tuple[Program, Plan]], writer: Writer
) -> Entry:
    """Returns an entry with measured programs, whose files it writes."""
    kind, machine = device.partition(":")[0], name_of(device)
    threads = {plan.threads for _, plan in rows}
    wide = [
        w
        for w in entry.wide
        if (w.pattern, w.device, w.plan.get("machine", "")) != (pattern, kind, machine)
        or w.plan.get("threads") not in threads
        or w.part is not None
    ]
    for program, plan in rows:
        file = writer.file(
            f"programs/{kind}.{name}.{pattern}", "json", strict_json.canonical(program.to_json())
        )
        wide.append(WideProgram(kind, pattern, file, plan.batch, plan.to_json()))
    return replace(entry, wide=tuple(wide))
