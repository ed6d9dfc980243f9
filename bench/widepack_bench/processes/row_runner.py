"""Runs the rows of a suite into one JSON document, each part of them in its own process.

The document is written after every row. A later run goes on with it: rows that are measured are not run
again, unless they were refused as noisy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..report.json_file import resumed, write_whole
from ..report.result_rows import Row, result_of
from ..text import plural
from .fresh import ProcessEnded, lines_of_fresh_process

LIMIT_S = 3600.0  # seconds between two rows: a build, a search and the compilation of all baselines
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Part:
    """Rows that one process measures.

    title: shown as progress. arguments: of the suite's function. rows: by key, what is known of each row
    before it is measured.
    """

    title: str
    arguments: Mapping[str, Any]
    rows: Mapping[str, Row]


@dataclass(frozen=True, slots=True)
class Suite:
    """What the rows of a suite have in common.

    form: the document's format and version. what: the suite in words. function: `module:generator`; it takes
    the arguments of a part, the options, and `rows`: those of the part that are measured. It yields their
    results. summary, table, one_line: what is written of rows, all rows, and one row. head: other fields of
    the document. steady: freed memory stays in the processes.
    """

    form: str
    what: str
    function: str
    summary: Callable[[Mapping[str, Row]], dict[str, Any]]
    table: Callable[[Mapping[str, Row]], str]
    one_line: Callable[[Row], str]
    head: Mapping[str, Any] = field(default_factory=dict)
    steady: bool = False

    def run(
        self,
        out: Path,
        parts: Sequence[Part],
        options: Mapping[str, Any],
        *,
        progress: Progress | None = None,
        report: Callable[[str], object] | None = print,
    ) -> dict[str, Any]:
        """Measures the rows that the document `out` does not have yet, and returns the document.

        options: fields of the options of a row. report: called with a line for each row, then with the table.
        Raises: UsageError.
        """
        document = resumed(out, self.form, f"the suite {self.what}".strip(), self.head)
        for number, part in enumerate(parts):
            if progress:
                progress(part.title, number, len(parts))
            tune = bool(options.get("tune"))
            waiting = {k: row for k, row in part.rows.items() if must_run(document["rows"].get(k), tune)}
            for key, result in self._measured(part, waiting, options):
                document["rows"][key] = row = {**waiting[key], **result}
                document["summary"] = self.summary(document["rows"])
                write_whole(out, document)
                if report:
                    report(f"{key}: {self.one_line(row)}")
        if progress:
            progress("suite", len(parts), len(parts))
        if report:
            report("\n" + self.table(document["rows"]))
        return document

    def _measured(
        self, part: Part, waiting: Mapping[str, Row], options: Mapping[str, Any]
    ) -> Iterator[tuple[str, Row]]:
        """Yields the key and the result of each row; an error is a result, too."""
        left = list(waiting)
        if not left:
            return
        arguments = {**part.arguments, **options, "rows": list(waiting.values())}
        lines = lines_of_fresh_process(
            self.function, arguments, threads=options.get("threads"), limit_s=LIMIT_S, steady=self.steady
        )
        try:
            for result in lines:
                yield left.pop(0), result
        except ProcessEnded as error:
            for key in left[:1]:
                yield key, {"error": str(error)}


def key_of(*parts: str, threads: int, dtype: str = "") -> str:
    """Returns the key of a row: `vit-s, N=8, batch 4, shared, 1 thread`; with another dtype also its name."""
    return ", ".join([*parts, plural(threads, "thread"), *([dtype] if dtype else [])])


def must_run(row: Row | None, tune: bool = False) -> bool:
    """Whether a row must be run: it is missing, ended with an error, was noisy, or lacks its tuned plan."""
    if row is None or "error" in row:
        return True
    if "skipped" in row:
        return False
    result = result_of(row)
    return (result is not None and result["verdict"] == "noisy") or (tune and "tuned_plan" not in row)
