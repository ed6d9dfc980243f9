"""Writes the results of the suite `real` as text: a summary, and the table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..report.result_rows import Cell, fastest, figures, line_of, markdown, measured
from ..text import duration, interval

TUNED = "widepack[tuned]"
BELOW_LOOP = 0.95  # Default plans below it over the eager loop are named in the summary.
BELOW_FASTEST = 0.9  # Tuned plans below it over the fastest baseline are named in the summary.

Rows = Mapping[str, Mapping[str, Any]]


def summary(rows: Rows) -> dict[str, Any]:
    """Summarizes the rows that were measured and quiet enough.

    default_over_loop: the default plans against the eager loop. default and tuned: the plans against the
    fastest baseline.
    """
    quiet = {key: row["result"] for key, row in rows.items() if _is_quiet(row)}
    compiled = {key: r for key, r in quiet.items() if len(r["baselines"]) > 1}
    tuned = {key: r["others"][TUNED] for key, r in compiled.items() if TUNED in r["others"]}
    return {
        "rows": len(rows),
        "default_over_loop": _figures(
            {key: r["baselines"]["loop"]["ratio"]["value"] for key, r in quiet.items()}, BELOW_LOOP
        ),
        "default": _figures({key: r["ratio"]["value"] for key, r in compiled.items()}, BELOW_FASTEST)
        | {"verdicts": dict(Counter(r["verdict"] for r in compiled.values()))},
        "tuned": _figures({key: r["ratio"]["value"] for key, r in tuned.items()}, BELOW_FASTEST)
        | {"verdicts": dict(Counter(r["verdict"] for r in tuned.values()))},
        "not_measured": sorted(set(rows) - set(quiet)),
    }


def _is_quiet(row: Mapping[str, Any]) -> bool:
    return "result" in row and row["result"]["verdict"] != "noisy"


def _figures(ratios: Mapping[str, float], least: float) -> dict[str, Any]:
    """Returns the number of ratios, their geometric mean, and the rows below `least`."""
    return {**figures(ratios), "below": sorted(key for key, ratio in ratios.items() if ratio < least)}


def real_table(rows: Rows, columns: Sequence[str] = ()) -> str:
    """Returns the rows as a table in Markdown. columns: names of `COLUMNS`; empty for all."""
    return markdown(rows, COLUMNS, columns)


def one_line(row: Mapping[str, Any]) -> str:
    """Returns the line that is printed when a row is done."""
    names = (
        "default",
        "over the loop",
        "tuned",
        "fastest baseline",
        "default ratio",
        "tuned ratio",
        "verdict",
    )
    return line_of(row, COLUMNS, names)


def _network(row: Mapping[str, Any]) -> str:
    first = row["inputs"][0]
    sample = first.partition("[")[2].partition("]")[0].split(",")[1:]
    count = row.get("parameters")
    parameters = f", {count / 1e6:.3g} M parameters" if count else ""
    dtype = f", {row['dtype']}" if "dtype" in row else ""
    return f"{row['title']} ({row['size']}, {'x'.join(sample)}{parameters}{dtype})"


def _tuned(cell: Cell) -> Cell:
    return measured(lambda r: cell(r["others"][TUNED]) if TUNED in r["others"] else "")


def _fastest(result: Mapping[str, Any]) -> str:
    if len(result["baselines"]) < 2:
        return ""
    return fastest(result)


def _verdict(row: Mapping[str, Any]) -> str:
    if "result" not in row:
        return str(row.get("skipped") or f"error: {row.get('error', '')[:120]}")
    result = row["result"]
    verdict = result["others"][TUNED]["verdict"] if TUNED in result["others"] else result["verdict"]
    return str(verdict)


COLUMNS: dict[str, Cell] = {
    "network": _network,
    "N": lambda row: str(row["members"]),
    "batch": lambda row: str(row["batch"]),
    "pattern": lambda row: str(row["pattern"]),
    "threads": lambda row: str(row["threads"]),
    "default": measured(lambda r: duration(r["median_ms"])),
    "over the loop": measured(lambda r: interval(r["baselines"]["loop"]["ratio"])),
    "tuned": _tuned(lambda r: duration(r["median_ms"])),
    "fastest baseline": measured(_fastest),
    "default ratio": measured(lambda r: interval(r["ratio"]) if len(r["baselines"]) > 1 else ""),
    "tuned ratio": _tuned(lambda r: interval(r["ratio"])),
    "roofline": _tuned(lambda r: f"{r['share']:.0%}" if r["share"] else ""),
    "verdict": _verdict,
}


def notes(rows: Rows) -> Iterator[str]:
    """Yields the lines below the table: the machine, the versions and the summary."""
    measured = [row["result"] for row in rows.values() if "result" in row]
    where = [row["environment"] for row in rows.values() if "result" in row]
    if not measured:
        return
    found: dict[str, set[str]] = {}
    for env in where:
        for package, version in env["versions"].items():
            found.setdefault(package, set()).add(version)
    versions = ", ".join(f"{package} {' and '.join(sorted(of))}" for package, of in found.items())
    dates = " and ".join(sorted({env["date"] for env in where}))
    yield f"{dates}, {where[0]['device']}, {versions}."
    totals = summary(rows)
    loop, tuned = totals["default_over_loop"], totals["tuned"]
    yield (
        f"Default plans over the eager loop: {loop['rows']} rows, geometric mean "
        f"{loop['geometric_mean']:.2f}, least {loop['least']:.2f}; below {BELOW_LOOP}: "
        f"{'; '.join(loop['below']) or 'none'}."
    )
    if tuned["rows"]:
        verdicts = ", ".join(f"{count} {verdict}" for verdict, count in tuned["verdicts"].items())
        yield (
            f"Tuned plans over the fastest baseline: {tuned['rows']} rows ({verdicts}), geometric mean "
            f"{tuned['geometric_mean']:.2f}, least {tuned['least']:.2f}; below {BELOW_FASTEST}: "
            f"{'; '.join(tuned['below']) or 'none'}."
        )
    if totals["not_measured"]:
        yield f"Not measured, or refused as noisy: {'; '.join(totals['not_measured'])}."
