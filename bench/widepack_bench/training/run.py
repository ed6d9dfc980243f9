"""Runs the suite `training`: each network and number of members in its own process.

The results are one JSON document, written after every row. A later run goes on with it: rows that are
measured are not run again, unless they were refused as noisy. Freed memory stays in each process (`STEADY`):
a step frees and requests megabytes, and each page that the system gives again takes time, in some steps and
not in others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..processes.fresh import STEADY, in_fresh_process
from ..report.json_file import read_document, write_whole
from .networks import TrainingNetwork, chosen_networks
from .table import one_line, summary, training_table

FORMAT = "widepack.training/1"
LIMIT_S = 3600.0  # seconds of one row, with the compilation of all baselines
Progress = Callable[[str, int, int], None]


def run_training(
    out: Path,
    *,
    names: Sequence[str] = (),
    members: Sequence[int] = (),
    patterns: Sequence[str] = ("shared",),
    threads: int = 1,
    progress: Progress | None = None,
    report: Callable[[str], object] | None = print,
    **options: Any,
) -> dict[str, Any]:
    """Measures the rows that the document `out` does not have yet, and returns the document.

    names: of networks; empty for all. members: numbers of members; empty for those of each network. report:
    called with a line for each row, then with the table. options: fields of `TrainingOptions`. Raises:
    UsageError.
    """
    document = read_document(out, FORMAT, "the suite training")
    if document is None:
        document = {"format": FORMAT, "rows": {}, "summary": {}}
    parts = [
        (network, count, pattern)
        for network in chosen_networks(names)
        for count in members or network.members
        for pattern in patterns
    ]
    for number, (network, count, pattern) in enumerate(parts):
        key = key_of(network, count, pattern, threads)
        if not must_run(document["rows"].get(key)):
            continue
        if progress:
            progress(f"{network.title}, N={count}, {pattern}", number, len(parts))
        row = in_fresh_process(
            "widepack_bench.training.row:run_row",
            {"name": network.name, "members": count, "pattern": pattern, "threads": threads, **options},
            threads=threads,
            limit_s=LIMIT_S,
            environment=STEADY,
        )
        document["rows"][key] = {
            "network": network.name,
            "title": network.title,
            "size": network.size,
            "members": count,
            "batch": network.batch,
            "pattern": pattern,
            "threads": threads,
            **row,
        }
        document["summary"] = summary(document["rows"])
        write_whole(out, document)
        if report:
            report(f"{key}: {one_line(document['rows'][key])}")
    if progress:
        progress("suite", len(parts), len(parts))
    if report:
        report("\n" + training_table(document["rows"]))
    return document


def key_of(network: TrainingNetwork, members: int, pattern: str, threads: int) -> str:
    """Returns the key of a row: `mlp, N=8, shared, 1 thread`."""
    return f"{network.name}, N={members}, {pattern}, {threads} thread{'' if threads == 1 else 's'}"


def must_run(row: dict[str, Any] | None) -> bool:
    """Whether a row must be run: it is missing, ended with an error, or was refused as noisy."""
    return row is None or "error" in row or row["result"]["verdict"] == "noisy"
