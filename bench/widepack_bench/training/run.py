"""Runs the suite `training`: each network and number of members in its own process.

Freed memory stays in each process: a step frees and requests megabytes, and each page that the system gives
again takes time, in some steps and not in others.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..processes.row_runner import Part, Suite, key_of
from .networks import TrainingNetwork, chosen_networks
from .table import one_line, summary, training_table

SUITE = Suite(
    "widepack.training/1",
    "training",
    "widepack_bench.training.row:run_rows",
    summary,
    training_table,
    one_line,
    steady=True,
)


def run_training(
    out: Path,
    *,
    names: Sequence[str] = (),
    members: Sequence[int] = (),
    patterns: Sequence[str] = ("shared",),
    progress: Any = None,
    report: Any = print,
    **options: Any,
) -> dict[str, Any]:
    """Measures the rows that the document `out` does not have yet, and returns the document.

    names: of networks; empty for all. members: numbers of members; empty for those of each network. The
    others are as in `Suite.run`; options: fields of `TrainingOptions`. Raises: UsageError.
    """
    threads = options.setdefault("threads", 1)
    parts = [
        _part(network, count, pattern, threads)
        for network in chosen_networks(names)
        for count in members or network.members
        for pattern in patterns
    ]
    return SUITE.run(out, parts, options, progress=progress, report=report)


def _part(network: TrainingNetwork, count: int, pattern: str, threads: int) -> Part:
    row = {
        "network": network.name,
        "title": network.title,
        "size": network.size,
        "members": count,
        "batch": network.batch,
        "pattern": pattern,
        "threads": threads,
    }
    title = f"{network.name}, N={count}, {pattern}"
    return Part(title, {}, {key_of(network.name, f"N={count}", pattern, threads=threads): row})
