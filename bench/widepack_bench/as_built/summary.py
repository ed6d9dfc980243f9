"""Makes figures of many rows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the figures of the rows of each number of threads and call, and of all.

    A row counts with the upper end of its interval.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {"all": list(rows)}
    for row in rows:
        groups.setdefault(f"threads={row['threads']}, {row['call']}", []).append(row)
    return {name: _figures(of) for name, of in groups.items()}


def _figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    ends = [_upper(r["ratio"]) for r in rows]
    return {
        "rows": len(rows),
        "valid": sum(r["valid"] for r in rows),
        "geometric_mean": _geometric([r["ratio"]["value"] for r in rows]),
        "least": min(r["ratio"]["value"] for r in rows),
        "at_least_0.97": sum(e >= 0.97 for e in ends) / len(ends),
        "below_0.92": sum(e < 0.92 for e in ends),
        "over_loop_below_1": sum(_upper(r["over_loop"]) < 1 for r in rows),
        "over_torch_geometric_mean": _geometric([r["over_torch"]["value"] for r in rows]),
        "over_torch_below_0.95": sum(_upper(r["over_torch"]) < 0.95 for r in rows),
        "best_form_geometric_mean": _geometric(
            [max([r["ratio"]["value"], *r["forms"].values()]) for r in rows]
        ),
    }


def _upper(interval: Mapping[str, float | None]) -> float:
    return math.inf if interval["high"] is None else interval["high"]


def _geometric(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))
