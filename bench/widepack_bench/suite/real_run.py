"""Runs the suite `real`: published networks at sizes that a CPU serves, with several numbers of members.

Each network and number of members is built in its own process. The results are one JSON document, written
after every row. A later run goes on with it: rows that are measured are not run again, unless they were
refused as noisy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..processes.fresh import ProcessEnded, lines_of_fresh_process
from ..report.json_file import read_document, write_whole
from .real_networks import BATCHES, MEMBERS, RealNetwork, chosen_networks
from .real_table import one_line, real_table, summary

FORMAT = "widepack.real/1"
LIMIT_S = 3600.0  # seconds between two rows: a build, a search and the compilation of all baselines
Progress = Callable[[str, int, int], None]


def run_real(
    out: Path,
    *,
    names: Sequence[str] = (),
    members: Sequence[int] = MEMBERS,
    batches: Sequence[int] = BATCHES,
    patterns: Sequence[str] = ("shared",),
    threads: int = 1,
    progress: Progress | None = None,
    report: Callable[[str], object] | None = print,
    **options: Any,
) -> dict[str, Any]:
    """Measures the rows that the document `out` does not have yet, and returns the document.

    names: of networks; empty for all. report: called with a line for each row, then with the table. options:
    fields of `RealOptions`. Raises: UsageError.
    """
    document = read_document(out, FORMAT, "the suite real")
    if document is None:
        document = {"format": FORMAT, "rows": {}, "summary": {}}
    dtype = options.get("dtype", "")
    parts = [(network, count) for network in chosen_networks(names) for count in members]
    for number, (network, count) in enumerate(parts):
        if progress:
            progress(f"{network.title}, N={count}", number, len(parts))
        calls = [
            (batch, pattern)
            for pattern in patterns
            for batch in batches
            if _must_run(
                document["rows"].get(key_of(network, count, batch, pattern, threads, dtype)),
                bool(options.get("tune")),
            )
        ]
        for row in _rows(network, count, calls, {**options, "threads": threads}):
            key = key_of(network, count, row["batch"], row["pattern"], threads, dtype)
            document["rows"][key] = {
                "network": network.name,
                "title": network.title,
                "size": network.size,
                "inputs": list(network.inputs),
                "members": count,
                "threads": threads,
                **({"dtype": dtype} if dtype else {}),
                **row,
            }
            document["summary"] = summary(document["rows"])
            write_whole(out, document)
            if report:
                report(f"{key}: {one_line(document['rows'][key])}")
    if progress:
        progress("suite", len(parts), len(parts))
    if report:
        report("\n" + real_table(document["rows"]))
    return document


def key_of(
    network: RealNetwork, members: int, batch: int, pattern: str, threads: int, dtype: str = ""
) -> str:
    """Returns the key of a row: `vit-s, N=8, batch 4, shared, 1 thread`; with another dtype also its name."""
    return (
        f"{network.name}, N={members}, batch {batch}, {pattern}, "
        f"{threads} thread{'' if threads == 1 else 's'}"
    ) + (f", {dtype}" if dtype else "")


def _rows(
    network: RealNetwork, members: int, calls: Sequence[tuple[int, str]], options: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yields the rows of a network; an error is a row, too."""
    left = list(calls)
    if not left:
        return
    try:
        for row in lines_of_fresh_process(
            "widepack_bench.suite.real_rows:run_network",
            {"name": network.name, "members": members, "calls": left, **options},
            threads=options["threads"],
            limit_s=LIMIT_S,
        ):
            yield row
            left.remove((row["batch"], row["pattern"]))
    except ProcessEnded as error:
        for batch, pattern in left[:1]:
            yield {"batch": batch, "pattern": pattern, "error": str(error)}


def _must_run(row: dict[str, Any] | None, tune: bool) -> bool:
    """Whether a row must be run: it is missing, ended with an error, was noisy, or was not tuned."""
    if row is None or "error" in row:
        return True
    if "skipped" in row:
        return False
    return row["result"]["verdict"] == "noisy" or (tune and "tuned_plan" not in row)
