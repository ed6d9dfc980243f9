"""Runs the suite of reference networks: each row builds, loads and compares random networks in its own
process.

The results are one JSON document, written after every row. A later run goes on with it: finished rows are not
run again, unless they were refused as noisy. Nothing is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from widepack.errors import UsageError

from ..processes.fresh import in_fresh_process
from ..report.json_file import read_document, write_whole
from .rows import SuiteRow, chosen
from .table import must_run, one_line, summary, table

FORMAT = "widepack.suite/1"
Progress = Callable[[str, int, int], None]


def run_suite(
    size: str,
    out: Path,
    *,
    names: Sequence[str] = (),
    progress: Progress | None = None,
    report: Callable[[str], object] | None = print,
    **options: Any,
) -> dict[str, Any]:
    """Runs the rows that the document `out` does not have yet, reports the table, and returns the document.

    size: `cpu` or `full`. names: of rows; empty for all. report: called with a line for each row, then with
    the table. options: fields of `NetworkOptions`. Raises: UsageError.
    """
    rows = chosen(names)
    document = _read(out, size)
    for number, row in enumerate(rows):
        key = key_of(row, options.get("threads", 1), options.get("dtype", ""))
        if not must_run(document["rows"].get(key)):
            continue
        if progress:
            progress(f"{row.title}, N={row.members}, batch {row.batch}", number, len(rows))
        result = in_fresh_process(
            f"{__name__}:run_named",
            {"name": row.name, "size": size, **options},
            threads=options.get("threads", 1),
        )
        document["rows"][key] = {
            "title": row.title,
            "members": row.members,
            "batch": row.batch,
            **({"dtype": options["dtype"]} if options.get("dtype") else {}),
            **result,
        }
        document["summary"] = summary(document["rows"])
        write_whole(out, document)
        if report:
            report(f"{key}: {one_line(document['rows'][key])}")
    if progress:
        progress("suite", len(rows), len(rows))
    document["summary"] = summary(document["rows"])
    if report:
        report("\n" + table(document))
    return document


def key_of(row: SuiteRow, threads: int, dtype: str = "") -> str:
    """Returns the key of a row in the document: `mlp-b1, 1 thread`, `mlp-b1, 1 thread, bfloat16`."""
    return f"{row.name}, {threads} thread{'' if threads == 1 else 's'}" + (f", {dtype}" if dtype else "")


def run_named(name: str, size: str, **options: Any) -> dict[str, Any]:
    """Runs the row of this name, in the process that `run_suite` starts."""
    from .row import NetworkOptions, run_row  # Imports torch, which the process of `run_suite` does not need.

    (row,) = chosen([name])
    return run_row(row, size, NetworkOptions(**options))


def _read(out: Path, size: str) -> dict[str, Any]:
    """Reads the document. Raises: UsageError for another kind of file, or one of another size."""
    document = read_document(out, FORMAT, "the suite")
    if document is None:
        return {"format": FORMAT, "size": size, "rows": {}, "summary": {}}
    if document["size"] != size:
        raise UsageError(
            f"{out} has rows in size {document['size']!r}, but this run is for {size!r}; give "
            "each its own file"
        )
    return document
