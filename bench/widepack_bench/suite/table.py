"""Writes the results of the suite as text: the summary of its rows, and the table of the README."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..text import duration, interval
from .rows import ROWS

BY_HAND = "trunk shared by hand"
BELOW = 0.9  # Rows with a ratio below it are named in the summary.


def must_run(row: Mapping[str, Any] | None) -> bool:
    """Whether a row must be run: it is missing, ended with an error, or was refused as noisy."""
    return row is None or "error" in row or any(r["verdict"] == "noisy" for r in row["report"]["rows"])


def summary(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Summarizes the measured rows.

    The summary has the number of rows that hold, the geometric mean of the ratios to the fastest baseline,
    and the rows below 0.9.
    """
    ratios = {key: r["ratio"]["value"] for key, r in _measured(rows)}
    holding = [key for key, r in _measured(rows) if r["verdict"] == "holds"]
    return {
        "rows": len(rows),
        "measured": len(ratios),
        "holds": len(holding),
        "share_holds": len(holding) / len(ratios) if ratios else None,
        "geometric_mean": math.exp(sum(map(math.log, ratios.values())) / len(ratios)) if ratios else None,
        **_regret(rows),
        "below": sorted(key for key, ratio in ratios.items() if ratio < BELOW),
        "not_measured": sorted(set(rows) - set(ratios)),
    }


def _regret(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns how much longer the chosen plan takes than the best candidate, over the rows measured again."""
    regrets = {key: row["again"]["regret"] for key, row in rows.items() if "regret" in row.get("again", {})}
    if not regrets:
        return {}
    worst = max(regrets, key=lambda key: regrets[key])
    return {
        "regret": {
            "rows": len(regrets),
            "geometric_mean": math.exp(sum(map(math.log, regrets.values())) / len(regrets)),
            "worst": [worst, regrets[worst]],
        }
    }


def _measured(rows: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    measured = [
        (key, row["report"]["rows"][0])
        for key, row in rows.items()
        if not must_run(row) and row["report"]["rows"]
    ]
    return [(key, row) for key, row in measured if row["ratio"]["value"] is not None]


def table(document: Mapping[str, Any]) -> str:
    """Returns the document as a table in Markdown, with the machine and the versions."""
    rows = {key: document["rows"][key] for key in sorted(document["rows"], key=_place)}
    reports = [row["report"] for row in rows.values() if "error" not in row]
    head = [
        "network",
        "N",
        "batch",
        "threads",
        "widepack",
        "fastest baseline",
        "ratio",
        "over the eager loop",
        "roofline",
        "verdict",
    ]
    body = [_cells(row) for row in rows.values()]
    lines = [
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(cells) + " |" for cells in body),
    ]
    totals = document["summary"]
    notes = []
    if reports:
        env = reports[0]["environment"]
        versions = ", ".join(f"{k} {v}" for k, v in env["versions"].items())
        notes.append(
            f"{', '.join(sorted({r['environment']['date'] for r in reports}))}, "
            f"{env['device']}, {versions}; sizes: {document['size']}."
        )
    if totals.get("measured"):
        notes.append(
            f"{totals['holds']} of {totals['measured']} measured rows hold "
            f"({totals['share_holds']:.0%}); geometric mean of the ratios to the fastest baseline "
            f"{totals['geometric_mean']:.2f}; below {BELOW}: {', '.join(totals['below']) or 'none'}."
        )
    if regret := totals.get("regret"):
        worst, times = regret["worst"]
        notes.append(
            f"The chosen plans take {regret['geometric_mean']:.3f} times as long as the best "
            f"candidate (geometric mean of {regret['rows']} rows, measured again in "
            f"other processes); the worst {times:.2f}, {worst}."
        )
    notes += [f"Not measured: {', '.join(totals['not_measured'])}."] if totals.get("not_measured") else []
    for key, row in rows.items():
        notes += _notes(key, row)
    return "\n".join([*lines, "", *notes])


def _place(key: str) -> tuple[int, str]:
    """Returns the sort key of a row: networks in the order of the suite, then threads."""
    name, _, threads = key.partition(", ")
    return next((i for i, row in enumerate(ROWS) if row.name == name), len(ROWS)), threads


def _cells(row: Mapping[str, Any]) -> list[str]:
    title = f"{row['title']}, {row['dtype']}" if "dtype" in row else row["title"]
    start = [title, str(row["members"]), str(row["batch"])]
    if "error" in row:
        return [*start, "", "", "", "", "", "", f"error: {row['error'][:120]}"]
    report = row["report"]
    if not report["rows"]:
        return [*start, str(report["environment"]["threads"]), "", "", "", "", "", "not measured"]
    (result,) = report["rows"]
    fastest, looped = result["baselines"][result["fastest"]], result["baselines"].get("loop")
    return [
        *start,
        str(report["environment"]["threads"]),
        duration(result["median_ms"]),
        f"{result['fastest']}, {duration(fastest['median_ms'])}",
        interval(result["ratio"]),
        f"{looped['ratio']['value']:.2f}" if looped and looped["ratio"]["value"] is not None else "",
        f"{result['roofline']['share']:.0%}" if result["roofline"] else "",
        result["verdict"],
    ]


def _notes(key: str, row: Mapping[str, Any]) -> list[str]:
    """Returns notes about a row: the memory floor of the MLP at batch 1, the time of the trunk shared by
    hand.
    """
    if "error" in row or not row["report"]["rows"]:
        return []
    (result,) = row["report"]["rows"]
    notes = []
    if key.startswith("mlp-b1,") and result["roofline"]:
        roof = result["roofline"]
        notes.append(
            f"{key}: the streaming floor is {duration(roof['stream_ms'])} "
            f"({roof['least_bytes'] / 1e6:.2f} MB at {roof['stream_bytes_per_s'] / 1e9:.1f} GB/s)."
        )
    other = result["others"].get(BY_HAND)
    if other:
        times = (
            ""
            if other["over_ours"]["value"] is None
            else f", {interval(other['over_ours'])} times as long as widepack"
        )
        notes.append(f"{key}: the {BY_HAND} takes {duration(other['median_ms'])}{times}.")
    return notes


def one_line(row: Mapping[str, Any]) -> str:
    """Returns the line that is printed when a row is done."""
    return " | ".join(cell for cell in _cells(row)[4:] if cell)
