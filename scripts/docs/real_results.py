"""Writes the tables of the suite `real` from real-cpu.json and real-default-cpu.json of bench/results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from results import read
from widepack_bench.suite.real_table import TUNED, notes, real_table
from widepack_bench.text import duration, interval

TUNED_COLUMNS = (
    "network",
    "N",
    "batch",
    "default",
    "tuned",
    "fastest baseline",
    "over the loop",
    "default ratio",
    "tuned ratio",
    "roofline",
    "verdict",
)
DEFAULT_COLUMNS = ("network", "N", "batch", "threads", "default", "over the loop", "verdict")
README_BATCH = 4
README_MEMBERS = 8


def _is_tuned(row: Mapping[str, Any]) -> bool:
    """Returns whether a row was tuned, or was skipped because the loop takes too long."""
    return TUNED in row["result"]["others"] if "result" in row else "skipped" in row


def _rows() -> dict[str, Any]:
    """Returns the rows with all baselines, as built and tuned, on one thread."""
    rows: dict[str, Any] = read("real-cpu")["rows"]
    return {k: r for k, r in rows.items() if r["threads"] == 1 and r["pattern"] == "shared" and _is_tuned(r)}


def tuned() -> str:
    """Returns the table of all rows, with notes."""
    rows = _rows()
    return "\n".join([real_table(rows, TUNED_COLUMNS), "", *(f"- {line}" for line in notes(rows))])


def default() -> str:
    """Returns the table of the rows that were measured as built, beside the eager loop alone."""
    rows: dict[str, Any] = read("real-default-cpu")["rows"]
    return "\n".join([real_table(rows, DEFAULT_COLUMNS), "", *(f"- {line}" for line in notes(rows))])


def readme() -> str:
    """Returns the table of the README: one batch and one number of members of every network."""
    lines = [
        "| network | members | batch | eager loop | as built | tuned | fastest alternative | speedup tuned |",
        "|---|---|---|---|---|---|---|---|",
    ]
    chosen = [
        row
        for row in _rows().values()
        if row["batch"] == README_BATCH and row["members"] == README_MEMBERS and "result" in row
    ]
    for row in chosen:
        result = row["result"]
        ours, fastest = result["others"][TUNED], result["baselines"][result["fastest"]]
        cells = [
            real_table({"": row}, ("network",)).splitlines()[-1].strip("| "),
            row["members"],
            row["batch"],
            duration(result["baselines"]["loop"]["median_ms"]),
            duration(result["median_ms"]),
            duration(ours["median_ms"]),
            f"{result['fastest']}, {duration(fastest['median_ms'])}",
            interval(ours["ratio"]),
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    env = chosen[0]["environment"]
    dates = " and ".join(sorted({row["environment"]["date"] for row in chosen}))
    return "\n".join(
        [
            *lines,
            "",
            f"{dates}, {env['device']}, one thread, torch {env['versions']['torch']}. Weights are random. "
            "Times are of one call of all members; the last column has a 95% interval.",
        ]
    )
