"""Writes the tables of the suite `real` from bench/results/real-cpu.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from widepack_bench.suite.real_table import TUNED, notes, real_table
from widepack_bench.text import duration

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results" / "real-cpu.json"
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
DEFAULT_COLUMNS = ("network", "N", "batch", "pattern", "default", "over the loop", "verdict")
README_ROWS = (
    "tabular-mlp, N=8, batch 4",
    "ft-transformer, N=8, batch 4",
    "lstm-forecaster, N=8, batch 1",
    "resnet18-64, N=8, batch 4",
    "mobilenetv3, N=8, batch 1",
    "resnet18-224, N=8, batch 1",
)


def _rows(chosen: Callable[[Mapping[str, Any]], bool]) -> dict[str, Any]:
    rows: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]
    return {key: row for key, row in rows.items() if chosen(row)}


def _is_tuned(row: Mapping[str, Any]) -> bool:
    return TUNED in row.get("result", {}).get("others", {})


def tuned() -> str:
    """Returns the rows with all baselines, as built and tuned, on one thread."""
    rows = _rows(lambda row: row["threads"] == 1 and _is_tuned(row))
    return _with_notes(rows, real_table(rows, TUNED_COLUMNS))


def default(threads: int) -> str:
    """Returns the rows of artifacts as built, beside the eager loop."""
    rows = _rows(lambda row: row["threads"] == threads)
    return _with_notes(rows, real_table(rows, DEFAULT_COLUMNS))


def _with_notes(rows: Mapping[str, Any], table: str) -> str:
    return table + "\n\n" + "\n".join(f"- {line}" for line in notes(rows))


def readme() -> str:
    """Returns the table of the README: six rows, on one thread."""
    lines = [
        "| network | members | batch | eager loop | as built | tuned | fastest alternative | speedup tuned |",
        "|---|---|---|---|---|---|---|---|",
    ]
    rows = _rows(lambda row: row["threads"] == 1 and row["pattern"] == "shared" and _is_tuned(row))
    chosen = [rows[f"{name}, shared, 1 thread"] for name in README_ROWS]
    for row in chosen:
        result = row["result"]
        ours, fastest = result["others"][TUNED], result["baselines"][result["fastest"]]
        ratio = ours["ratio"]
        cells = [
            real_table({"": row}, ("network",)).splitlines()[-1].strip("| "),
            row["members"],
            row["batch"],
            duration(result["baselines"]["loop"]["median_ms"]),
            duration(result["median_ms"]),
            duration(ours["median_ms"]),
            f"{result['fastest']}, {duration(fastest['median_ms'])}",
            f"{ratio['value']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]",
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    env = chosen[0]["environment"]
    return "\n".join(
        [
            *lines,
            "",
            f"{env['date']}, {env['device']}, one thread, torch {env['versions']['torch']}. Weights are "
            "random.",
            "Times are of one call of all members; the last column has a 95% interval.",
        ]
    )
