"""What the suite found, in words: the summary over its rows, and the table of the README."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .rows import ROWS
from ..text import duration

BY_HAND = "trunk shared by hand"
BELOW = 0.9  # a row under it is no near miss


def wanted(found: Mapping[str, Any] | None) -> bool:
    """Whether a row has to be run: it is missing, ended with an error, or was refused as noisy."""
    return found is None or "error" in found or any(r["verdict"] == "noisy" for r in found["report"]["rows"])


def summary(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Over the rows that were measured: how many hold, the geometric mean of the ratios to the fastest baseline, what is below 0.9."""
    ratios = {key: r["ratio"]["value"] for key, r in _measured(rows)}
    held = [key for key, r in _measured(rows) if r["verdict"] == "holds"]
    return {
        "rows": len(rows),
        "measured": len(ratios),
        "holds": len(held),
        "share_holds": len(held) / len(ratios) if ratios else None,
        "geometric_mean": math.exp(sum(map(math.log, ratios.values())) / len(ratios)) if ratios else None,
        **_regret(rows),
        "below": sorted(key for key, ratio in ratios.items() if ratio < BELOW),
        "not_measured": sorted(set(rows) - set(ratios)),
    }


def _regret(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Over the rows that were measured again: how much longer the chosen plan takes than the best candidate."""
    found = {key: row["again"]["regret"] for key, row in rows.items() if "regret" in row.get("again", {})}
    if not found:
        return {}
    worst = max(found, key=lambda key: found[key])
    return {
        "regret": {
            "rows": len(found),
            "geometric_mean": math.exp(sum(map(math.log, found.values())) / len(found)),
            "worst": [worst, found[worst]],
        }
    }


def _measured(rows: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    found = [(key, row["report"]["rows"][0]) for key, row in rows.items() if not wanted(row) and row["report"]["rows"]]
    return [(key, row) for key, row in found if row["ratio"]["value"] is not None]


def table(document: Mapping[str, Any]) -> str:
    """The document as a table in Markdown, with what it was measured on."""
    rows = {key: document["rows"][key] for key in sorted(document["rows"], key=_place)}
    reports = [row["report"] for row in rows.values() if "error" not in row]
    head = ["network", "N", "batch", "threads", "widepack", "fastest baseline", "ratio", "over the eager loop", "roofline", "verdict"]
    body = [_cells(row) for row in rows.values()]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *("| " + " | ".join(cells) + " |" for cells in body)]
    found = document["summary"]
    said = []
    if reports:
        env = reports[0]["environment"]
        versions = ", ".join(f"{k} {v}" for k, v in env["versions"].items())
        said.append(f"{', '.join(sorted({r['environment']['date'] for r in reports}))}, {env['device']}, {versions}; sizes: {document['size']}.")
    if found.get("measured"):
        said.append(
            f"{found['holds']} of {found['measured']} measured rows hold ({found['share_holds']:.0%}); geometric mean of the ratios to the fastest baseline "
            f"{found['geometric_mean']:.2f}; below {BELOW}: {', '.join(found['below']) or 'none'}."
        )
    if regret := found.get("regret"):
        worst, times = regret["worst"]
        said.append(
            f"The chosen plans take {regret['geometric_mean']:.3f} times as long as the best candidate (geometric mean of {regret['rows']} rows, measured again in "
            f"processes of their own); the worst {times:.2f}, {worst}."
        )
    said += [f"Not measured: {', '.join(found['not_measured'])}."] if found.get("not_measured") else []
    for key, row in rows.items():
        said += _notes(key, row)
    return "\n".join([*lines, "", *said])


def _place(key: str) -> tuple[int, str]:
    """The order of the suite, whatever the order of measuring: by network, then by threads."""
    name, _, threads = key.partition(", ")
    return next((i for i, row in enumerate(ROWS) if row.name == name), len(ROWS)), threads


def _cells(row: Mapping[str, Any]) -> list[str]:
    start = [row["title"], str(row["members"]), str(row["batch"])]
    if "error" in row:
        return [*start, "", "", "", "", "", "", f"error: {row['error'][:120]}"]
    report = row["report"]
    if not report["rows"]:
        return [*start, str(report["environment"]["threads"]), "", "", "", "", "", "not measured"]
    (found,) = report["rows"]
    fastest, looped = found["baselines"][found["fastest"]], found["baselines"].get("loop")
    return [
        *start,
        str(report["environment"]["threads"]),
        duration(found["median_ms"]),
        f"{found['fastest']}, {duration(fastest['median_ms'])}",
        _interval(found["ratio"]),
        f"{looped['ratio']['value']:.2f}" if looped and looped["ratio"]["value"] is not None else "",
        f"{found['roofline']['share']:.0%}" if found["roofline"] else "",
        found["verdict"],
    ]


def _notes(key: str, row: Mapping[str, Any]) -> list[str]:
    """What stands beside a row: the streaming floor of the MLP at batch 1, the trunk that was shared by hand."""
    if "error" in row or not row["report"]["rows"]:
        return []
    (found,) = row["report"]["rows"]
    said = []
    if key.startswith("mlp-b1,") and found["roofline"]:
        roof = found["roofline"]
        said.append(
            f"{key}: the streaming floor is {duration(roof['stream_ms'])} ({roof['least_bytes'] / 1e6:.2f} MB at {roof['stream_bytes_per_s'] / 1e9:.1f} GB/s)."
        )
    other = found["others"].get(BY_HAND)
    if other:
        times = "" if other["over_ours"]["value"] is None else f", {_interval(other['over_ours'])} times as long as widepack"
        said.append(f"{key}: the {BY_HAND} takes {duration(other['median_ms'])}{times}.")
    return said


def one_line(row: Mapping[str, Any]) -> str:
    """A row's figures, as they are said when it is done."""
    return " | ".join(cell for cell in _cells(row)[4:] if cell)


def _interval(row: Mapping[str, Any]) -> str:
    if row["value"] is None:
        return "too few rounds"
    high = "open" if row["high"] is None else f"{row['high']:.2f}"
    return f"{row['value']:.2f} [{row['low']:.2f}, {high}]"
