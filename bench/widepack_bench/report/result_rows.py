"""Writes rows of results as text: a table in Markdown, and one line for each row."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..text import duration

Row = Mapping[str, Any]
Cell = Callable[[Row], str]


def markdown(rows: Mapping[str, Row], columns: Mapping[str, Cell], names: Sequence[str] = ()) -> str:
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
    return lambda row: cell(row["result"]) if "result" in row else ""


def fastest(result: Row) -> str:
    """Returns the name and the time of the fastest baseline."""
    return f"{result['fastest']}, {duration(result['baselines'][result['fastest']]['median_ms'])}"


def figures(ratios: Mapping[str, float]) -> dict[str, Any]:
    """Returns the number of ratios, their geometric mean and the least."""
    if not ratios:
        return {"rows": 0, "geometric_mean": None, "least": None}
    mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
    return {"rows": len(ratios), "geometric_mean": mean, "least": min(ratios.values())}
