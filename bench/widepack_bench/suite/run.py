"""Runs the suites of networks: each network is built, loaded and compared in its own process.

`run_suite` runs small networks of many kinds, `run_real` published networks at sizes that a CPU serves.
Nothing is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..processes.row_runner import Part, Suite, key_of
from .real_networks import BATCHES, MEMBERS, chosen_networks
from .rows import chosen
from .table import notes, one_line, reference_table, summary, table


def _table(rows: Any) -> str:
    return "\n".join([table(rows), "", *notes(rows)])


SUITE = Suite(
    "widepack.suite/1", "", "widepack_bench.suite.row:run_reference", summary, reference_table, one_line
)
REAL = Suite("widepack.real/1", "real", "widepack_bench.suite.row:run_real", summary, _table, one_line)


def run_suite(
    size: str,
    out: Path,
    *,
    names: Sequence[str] = (),
    progress: Any = None,
    report: Any = print,
    **options: Any,
) -> dict[str, Any]:
    """Runs the rows of the suite that the document `out` does not have yet, and returns the document.

    size: `cpu` or `full`. names: of rows; empty for all. The others are as in `Suite.run`; options: fields of
    `SuiteOptions`. Raises: UsageError.
    """
    threads, dtype = options.setdefault("threads", 1), options.get("dtype", "")
    parts = [
        Part(
            f"{row.title}, N={row.members}, batch {row.batch}",
            {"name": row.name, "size": size},
            {
                key_of(row.name, threads=threads, dtype=dtype): {
                    "title": row.title,
                    "members": row.members,
                    "batch": row.batch,
                    **({"dtype": dtype} if dtype else {}),
                }
            },
        )
        for row in chosen(names)
    ]
    suite = replace(SUITE, head={"size": size})
    return suite.run(out, parts, options, progress=progress, report=report)


def run_real(
    out: Path,
    *,
    names: Sequence[str] = (),
    members: Sequence[int] = MEMBERS,
    batches: Sequence[int] = BATCHES,
    patterns: Sequence[str] = ("shared",),
    progress: Any = None,
    report: Any = print,
    **options: Any,
) -> dict[str, Any]:
    """Runs the rows of the suite `real` that the document `out` does not have yet, and returns the document.

    names: of networks; empty for all. The others are as in `Suite.run`; options: fields of `SuiteOptions`.
    Raises: UsageError.
    """
    threads, dtype = options.setdefault("threads", 1), options.get("dtype", "")
    parts = []
    for network in chosen_networks(names):
        for count in members:
            common = {
                "network": network.name,
                "title": network.title,
                "size": network.size,
                "inputs": list(network.inputs),
                "members": count,
                "threads": threads,
                **({"dtype": dtype} if dtype else {}),
            }
            calls = [(batch, pattern) for pattern in patterns for batch in batches]
            rows = {
                key_of(network.name, f"N={count}", f"batch {batch}", pattern, threads=threads, dtype=dtype): {
                    **common,
                    "batch": batch,
                    "pattern": pattern,
                }
                for batch, pattern in calls
            }
            parts.append(Part(f"{network.title}, N={count}", {"name": network.name}, rows))
    return REAL.run(out, parts, options, progress=progress, report=report)
