"""Writes the results of the suite `training` as text: a summary, and the table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..report.result_rows import (
    Cell,
    Row,
    Rows,
    fastest,
    figures,
    line_of,
    markdown,
    measured,
    over_loop,
    quiet,
    verdict,
)
from ..text import duration, interval


def summary(rows: Rows) -> dict[str, Any]:
    """Summarizes the rows that were measured and quiet enough.

    over_loop: the fused module against the loop. over_uncompiled: against the fastest baseline without
    compilation. over_fastest: the faster of the fused module and its compiled form, against the fastest of
    all baselines.
    """
    results = quiet(rows)
    return {
        "rows": len(rows),
        "over_loop": _over(results, lambda name: name == "loop"),
        "over_uncompiled": _over(results, lambda name: "compiled" not in name),
        "over_fastest": figures(results, best, 1.0),
        "not_measured": sorted(set(rows) - set(results)),
    }


def best(result: Row) -> float:
    """Returns the ratio of the fastest baseline to the faster of the fused module and its compiled form."""
    ratios = [result["ratio"], *(other["ratio"] for other in result["others"].values())]
    return float(max(ratio["value"] for ratio in ratios))


def _over(results: Rows, among: Callable[[str], bool]) -> dict[str, Any]:
    """Returns the figures of the ratios to the fastest of some baselines, for the results that have one."""

    def ratios(result: Row) -> list[float]:
        return [t["ratio"]["value"] for name, t in result["baselines"].items() if among(name)]

    return figures({k: r for k, r in results.items() if ratios(r)}, lambda result: min(ratios(result)))


def training_table(rows: Rows, columns: Sequence[str] = ()) -> str:
    """Returns the rows as a table in Markdown. columns: names of `COLUMNS`; empty for all."""
    return markdown(rows, COLUMNS, columns)


def one_line(row: Row) -> str:
    """Returns the line that is printed when a row is done."""
    return line_of(row, COLUMNS, [n for n in COLUMNS if n not in ("network", "N", "batch", "inputs")])


def _compiled(cell: Cell) -> Cell:
    """Returns the cell of the compiled fused module."""
    return measured(lambda r: "".join(cell(other) for other in r["others"].values()))


COLUMNS: Mapping[str, Cell] = {
    "network": lambda row: f"{row['title']} ({row['size']})",
    "N": lambda row: str(row["members"]),
    "batch": lambda row: str(row["batch"]),
    "inputs": lambda row: "one batch for all" if row["pattern"] == "shared" else "a batch for each",
    "widepack": measured(lambda r: duration(r["median_ms"])),
    "compiled": _compiled(lambda other: duration(other["median_ms"])),
    "fastest baseline": measured(lambda r: f"{fastest(r)}, of {len(r['baselines'])}"),
    "ratio": measured(lambda r: interval(r["ratio"])),
    "compiled ratio": _compiled(lambda other: interval(other["ratio"])),
    "over the loop": measured(over_loop),
    "verdict": verdict,
}
"""The columns of the table, from a row of the document."""
