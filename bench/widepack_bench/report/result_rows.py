"""Writes rows of results as text: a table in Markdown, one line for each row, and what sums them up.

A row of a document has its measurements as `result`, or in a report of one batch as `report`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..text import duration, interval

Row = Mapping[str, Any]
Rows = Mapping[str, Row]
Cell = Callable[[Row], str]


def result_of(row: Row) -> Row | None:
    """Returns what was measured; None where nothing was."""
    rows = row["report"]["rows"] if "report" in row else [row["result"]] if "result" in row else []
    return rows[0] if rows else None


def environment_of(row: Row) -> Row:
    """Returns where a row was measured."""
    environment: Row = row.get("report", row).get("environment", {"threads": ""})
    return environment


def quiet(rows: Rows) -> dict[str, Row]:
    """Returns the results of the rows that were measured and not refused as noisy."""
    found = {key: result_of(row) for key, row in rows.items()}
    return {key: r for key, r in found.items() if r is not None and r["verdict"] != "noisy"}


def markdown(rows: Rows, columns: Mapping[str, Cell], names: Sequence[str] = ()) -> str:
    """Returns rows as a table. names: of the columns; empty for all."""
    chosen = list(names or columns)
    lines = ["| " + " | ".join(chosen) + " |", "|" + "---|" * len(chosen)]
    lines += ["| " + " | ".join(columns[n](row) for n in chosen) + " |" for row in rows.values()]
    return "\n".join(lines)


def line_of(row: Row, columns: Mapping[str, Cell], names: Sequence[str]) -> str:
    """Returns the cells of a row that are not empty, with their names, as one line."""
    return " | ".join(f"{n} {cell}" for n in names if (cell := columns[n](row)))


def measured(cell: Cell) -> Cell:
    """Returns the cell of a row that is empty where nothing was measured. cell: takes the row's result."""
    return lambda row: "" if (result := result_of(row)) is None else cell(result)


def verdict(row: Row) -> str:
    """Returns the verdict of a row, or why it has none."""
    if (result := result_of(row)) is not None:
        return str(result["verdict"])
    return str(row.get("skipped") or f"error: {row.get('error', 'not measured')[:120]}")


def fastest(result: Row) -> str:
    """Returns the name and the time of the fastest baseline."""
    return f"{result['fastest']}, {duration(result['baselines'][result['fastest']]['median_ms'])}"


def over_loop(result: Row) -> str:
    """Returns the ratio to the loop, where it took part."""
    loop = result["baselines"].get("loop")
    return interval(loop["ratio"]) if loop else ""


def figures(results: Rows, ratio: Callable[[Row], float], least: float | None = None) -> dict[str, Any]:
    """Returns the number of ratios, their geometric mean, the least, and the verdicts.

    least: adds the keys of the ratios below it.
    """
    ratios = {key: ratio(result) for key, result in results.items()}
    values = list(ratios.values())
    mean = math.exp(sum(map(math.log, values)) / len(values)) if values else None
    below = {} if least is None else {"below": sorted(k for k, v in ratios.items() if v < least)}
    verdicts = dict(Counter(r["verdict"] for r in results.values()))
    found = {"rows": len(values), "geometric_mean": mean, "least": min(values, default=None)}
    return {**found, "verdicts": verdicts, **below}


def places(rows: Rows) -> Iterator[str]:
    """Yields a line with the dates, the machine and all versions with which the rows were measured."""
    where = [environment_of(row) for row in rows.values() if result_of(row) is not None]
    if not where:
        return
    found: dict[str, set[str]] = {}
    for env in where:
        for package, version in env["versions"].items():
            found.setdefault(package, set()).add(version)
    versions = ", ".join(f"{package} {' and '.join(sorted(of))}" for package, of in found.items())
    dates = " and ".join(sorted({env["date"] for env in where}))
    yield f"{dates}, {where[0]['device']}, {versions}."
