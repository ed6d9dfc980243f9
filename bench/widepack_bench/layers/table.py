"""Writes the results of `widepack bench-layers` as text: layers, rows, summary. No torch."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..text import columns, duration, interval, plural

BELOW = 0.9  # Rows with a ratio below it are named in the summary.
COMPILED_MEMBER = "compiled-member"


def measured(row: Mapping[str, Any] | None) -> bool:
    """Whether a row was measured: it exists, has no error, and was not refused as noisy."""
    return row is not None and "error" not in row and row["verdict"] != "noisy"


def settled(row: Mapping[str, Any] | None) -> bool:
    """Whether a resumed run keeps a row: it was measured, and its interval is narrow enough for a verdict."""
    return measured(row) and row is not None and row["verdict"] != "unclear"


def summary(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Summarizes all rows.

    The summary has the number of rows that hold, the geometric means of both ratios, the rows below 0.9, the
    rows that failed, and for each strategy the N from which it wins.
    """
    timed = {key: row for key, row in rows.items() if measured(row) and row["verdict"] != "checked"}
    against = {key: row["ratio"]["value"] for key, row in timed.items() if row["ratio"]["value"] is not None}
    compiled = [r["value"] for row in timed.values() if (r := row[COMPILED_MEMBER]) and r["value"]]
    holding = sum(row["verdict"] == "holds" for row in timed.values())
    return {
        "rows": len(rows),
        "checked": sum("error" not in row for row in rows.values()),
        "measured": len(timed),
        "holds": holding,
        "share_holds": holding / len(timed) if timed else None,
        "geometric_mean": _mean(list(against.values())),
        "geometric_mean_compiled_member": _mean(compiled),
        "below": sorted(key for key, value in against.items() if value < BELOW),
        "noisy": sorted(key for key, row in rows.items() if "error" not in row and not measured(row)),
        "failed": sorted(key for key, row in rows.items() if "error" in row),
        "wins_from": wins(rows),
    }


def wins(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, int | None]]:
    """Returns for each layer and strategy the smallest N from which it is as fast as the fastest baseline.

    It must be as fast in every row from that N on. None where it is slower at the largest N.
    """
    winners: dict[str, dict[str, int | None]] = {}
    by_layer: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows.values():
        if measured(row) and row["verdict"] != "checked":
            by_layer.setdefault(row["primitive"], []).append(row)
    for name, group in by_layer.items():
        order = sorted(group, key=lambda row: -row["members"])
        strategies = {s for row in order for s, _ in _ratios(row)}
        for strategy in sorted(strategies):
            least: int | None = None
            for row in order:
                if (dict(_ratios(row)).get(strategy) or 0.0) < 1.0:
                    break
                least = row["members"]
            winners.setdefault(name, {})[strategy] = least
    return winners


def _ratios(row: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Returns the ratio of each strategy that has a time in a row, under each of its names."""
    timed = [(name, s) for name, s in row["strategies"].items() if "median_ms" in s]
    return [(n, s["ratio"]["value"]) for name, s in timed for n in (name, *s["same"])]


def _mean(values: Sequence[float]) -> float | None:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def listed(sweeps: Sequence[Any]) -> str:
    """Returns the layers with their aliases, as text."""
    body = [
        [s.name, s.family, ", ".join(s.aliases), f"batch {s.shape.batch}: {', '.join(s.shape.inputs)}"]
        for s in sweeps
    ]
    return "\n".join(
        [
            *columns([["primitive", "family", "also", "shape of quick and full"], *body]),
            "",
            "widepack bench-layers takes names, aliases and families. `all` means every layer, "
            "`block` every block.",
        ]
    )


def table(document: Mapping[str, Any], top: int | None = None) -> str:
    """Returns the rows and the summary as text, in the order of measuring.

    top: show only this many rows: the slowest ones against the fastest baseline, slowest first.
    """
    rows = [row for row in document["rows"].values() if "error" not in row]
    shown = rows if top is None else sorted(rows, key=lambda row: row["ratio"]["value"] or math.inf)[:top]
    head = [
        "primitive",
        "N",
        "auto",
        "widepack",
        "compiled member x N",
        "fastest baseline",
        "ratio",
        "best strategy",
        "verdict",
    ]
    lines = columns([head, *map(_cells, shown)]) if shown else []
    lines += [f"({len(rows) - len(shown)} more)"] if len(shown) < len(rows) else []
    return "\n".join([_title(document), "", *lines, "", summary_text(document)])


def markdown(document: Mapping[str, Any]) -> str:
    """Returns the document as a table in Markdown, one line for each layer.

    A line has both ratios of `auto` and what it runs, from the smallest N to the largest.
    """
    by_layer: dict[str, list[Mapping[str, Any]]] = {}
    for row in document["rows"].values():
        by_layer.setdefault(row["primitive"], []).append(row)
    counts = sorted({row["members"] for row in document["rows"].values()})
    title = " / ".join(map(str, counts))
    lines = [
        f"| primitive | over the fastest baseline, N = {title} | over one compiled member "
        "N times | what `auto` runs |",
        "|---|---|---|---|",
    ]
    for name, rows in by_layer.items():
        by_count = {row["members"]: row for row in rows}
        cells = [
            [f(by_count[n]) if n in by_count else "" for n in counts] for f in (_against, _over_member, _runs)
        ]
        if len(set(cells[2])) == 1:
            cells[2] = cells[2][:1]
        lines.append(f"| {name} | " + " | ".join(" / ".join(c) for c in cells) + " |")
    env = document["environment"]
    versions = ", ".join(f"{k} {v}" for k, v in env["versions"].items())
    totals = document["summary"]
    text = [f"{env['date']}, {env['device']}, {plural(env['threads'], 'thread')}, {versions}."]
    text += [f"{_holding(totals)}."] if totals["measured"] else []
    text += [f"Not measured, too noisy: {', '.join(totals['noisy'])}."] if totals["noisy"] else []
    text += [f"Failed: {', '.join(totals['failed'])}."] if totals["failed"] else []
    return "\n".join([*lines, "", *text])


def main() -> None:
    """Prints a document as a table in Markdown: `python -m widepack_bench.layers.table FILE`."""
    print(markdown(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))


def _against(row: Mapping[str, Any]) -> str:
    """Returns the ratio, and the verdict where it is not `holds`."""
    if "error" in row:
        return "failed"
    words = str(row["verdict"])
    if row["ratio"]["value"] is None:
        return words
    return f"{row['ratio']['value']:.2f}" + ("" if words == "holds" else f" ({words})")


def _over_member(row: Mapping[str, Any]) -> str:
    return f"{ratio['value']:.2f}" if (ratio := row.get(COMPILED_MEMBER)) and ratio["value"] else ""


def _runs(row: Mapping[str, Any]) -> str:
    """Returns strategies and backend: `loop on aot`."""
    if "error" in row:
        return ""
    if "tuned" not in row:
        return str(row["auto"])
    used = [s for s in row["tuned"]["strategies"] if s not in ("once", "part", "shape", "dim")] or list(
        row["tuned"]["strategies"]
    )
    return f"{' + '.join(used) or 'nothing'} on {row['tuned']['backend']}"


def _holding(totals: Mapping[str, Any]) -> str:
    """Returns how many rows hold, and the geometric means, as text."""
    mean = totals["geometric_mean_compiled_member"]
    compiled = f", over one compiled member {mean:.2f}" if mean else ""
    return (
        f"{totals['holds']} of {plural(totals['measured'], 'measured row')} hold "
        f"({totals['share_holds']:.0%}); geometric mean over the fastest baseline "
        f"{totals['geometric_mean']:.2f}{compiled}; below {BELOW}: {', '.join(totals['below']) or 'none'}"
    )


def summary_text(document: Mapping[str, Any]) -> str:
    """Returns the summary as text."""
    totals = document["summary"]
    lines = [
        f"{totals['checked']} of {plural(totals['rows'], 'row')} answer as each member "
        "alone does in float64, in every strategy"
    ]
    lines += [_holding(totals)] if totals["measured"] else []
    for name, strategies in totals["wins_from"].items():
        ways = [f"{s} {'no N here' if n is None else f'N={n}'}" for s, n in strategies.items()]
        lines.append(f"{name} is as fast as the fastest baseline from: {', '.join(ways)}")
    lines += [f"too noisy to say: {', '.join(totals['noisy'])}"] if totals["noisy"] else []
    lines += [f"{key} failed: {document['rows'][key]['error']}" for key in totals["failed"]]
    return "\n".join(lines)


def one_line(key: str, row: Mapping[str, Any]) -> str:
    """Returns the line that is printed when a row is done."""
    return (
        f"{key}: {row['error']}"
        if "error" in row
        else f"{key}: {' | '.join(cell for cell in _cells(row)[2:] if cell)}"
    )


def _title(document: Mapping[str, Any]) -> str:
    env = document["environment"]
    who = (
        "each member has its own inputs"
        if document["pattern"] == "each"
        else "every member sees the same inputs"
    )
    return (
        f"preset {document['preset']}, {who}; {env['device']}, "
        f"{plural(env['threads'], 'thread')}, torch {env['versions']['torch']}; "
        f"a ratio is a baseline's time over widepack's"
    )


def _cells(row: Mapping[str, Any]) -> list[str]:
    timed = {name: s["median_ms"] for name, s in row["strategies"].items() if "median_ms" in s}
    best = min(timed, key=lambda name: timed[name])
    compiled = row[COMPILED_MEMBER]
    fastest = row["baselines"][row["fastest"]]["median_ms"]
    return [
        row["primitive"],
        str(row["members"]),
        row["auto"],
        duration(row["median_ms"]),
        f"{compiled['value']:.2f}x" if compiled and compiled["value"] else "-",
        f"{row['fastest']} {duration(fastest)}",
        interval(row["ratio"]),
        f"{'auto' if best == 'auto' else best} {duration(timed[best])}",
        row["verdict"],
    ]


if __name__ == "__main__":
    main()
