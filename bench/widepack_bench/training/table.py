"""Writes the results of the suite `training` as text: a summary, and the table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..report.result_rows import Cell, fastest, figures, line_of, markdown, measured
from ..text import duration, interval

Rows = Mapping[str, Mapping[str, Any]]


def summary(rows: Rows) -> dict[str, Any]:
    """Summarizes the rows that were measured and quiet enough.

    over_loop: the fused module against the loop. over_uncompiled: against the fastest baseline without
    compilation. over_fastest: the faster of the fused module and its compiled form, against the fastest of
    all baselines.
    """
    quiet = {k: r["result"] for k, r in rows.items() if "result" in r and r["result"]["verdict"] != "noisy"}
    over_all = {key: best(r) for key, r in quiet.items()}
    return {
        "rows": len(rows),
        "verdicts": dict(Counter(r["verdict"] for r in quiet.values())),
        "over_loop": figures(_ratios(quiet, lambda name: name == "loop")),
        "over_uncompiled": figures(_ratios(quiet, lambda name: "compiled" not in name)),
        "over_fastest": figures(over_all),
        "below_1": sorted(key for key, ratio in over_all.items() if ratio < 1),
        "not_measured": sorted(set(rows) - set(quiet)),
    }


def best(result: Mapping[str, Any]) -> float:
    """Returns the ratio of the fastest baseline to the faster of the fused module and its compiled form."""
    ratios = [result["ratio"], *(other["ratio"] for other in result["others"].values())]
    return float(max(ratio["value"] for ratio in ratios))


def _ratios(results: Rows, among: Callable[[str], bool]) -> dict[str, float]:
    """Returns the ratio of the fastest of some baselines, for the results that have one."""
    found = {
        key: [t["ratio"]["value"] for name, t in result["baselines"].items() if among(name)]
        for key, result in results.items()
    }
    return {key: min(ratios) for key, ratios in found.items() if ratios}


def training_table(rows: Rows, columns: Sequence[str] = ()) -> str:
    """Returns the rows as a table in Markdown. columns: names of `COLUMNS`; empty for all."""
    return markdown(rows, COLUMNS, columns)


def one_line(row: Mapping[str, Any]) -> str:
    """Returns the line that is printed when a row is done."""
    names = (
        "widepack",
        "compiled",
        "over the loop",
        "fastest baseline",
        "ratio",
        "compiled ratio",
        "verdict",
    )
    return line_of(row, COLUMNS, names)


def _loop(result: Mapping[str, Any]) -> str:
    loop = result["baselines"].get("loop")
    return interval(loop["ratio"]) if loop else ""


def _compiled(cell: Cell) -> Cell:
    """Returns the cell of the compiled fused module."""
    return measured(lambda r: "".join(cell(other) for other in r["others"].values()))


def _verdict(row: Mapping[str, Any]) -> str:
    return str(row["result"]["verdict"]) if "result" in row else f"error: {row.get('error', '')[:120]}"


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
    "over the loop": measured(_loop),
    "verdict": _verdict,
}
"""The columns of the table, from a row of the document."""
