"""Writes the results of the suites of networks as text: a summary, the table, and notes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..report.result_rows import (
    Cell,
    Row,
    Rows,
    environment_of,
    fastest,
    figures,
    line_of,
    markdown,
    measured,
    over_loop,
    places,
    quiet,
    result_of,
    verdict,
)
from ..text import duration, interval
from .rows import ROWS

TUNED = "widepack[tuned]"
BELOW_LOOP = 0.95  # Default plans below it over the eager loop are named in the summary.
BELOW_FASTEST = 0.9  # Plans below it over the fastest baseline are named in the summary.


def summary(rows: Rows) -> dict[str, Any]:
    """Summarizes the rows that were measured and quiet enough.

    default_over_loop: the default plans against the eager loop. default and tuned: the plans against the
    fastest baseline, where one besides the loop took part.
    """
    results = {key: r for key, r in quiet(rows).items() if r["ratio"]["value"] is not None}
    looped = {key: r for key, r in results.items() if "loop" in r["baselines"]}
    compiled = {key: r for key, r in results.items() if len(r["baselines"]) > 1}
    tuned = {key: r["others"][TUNED] for key, r in compiled.items() if TUNED in r["others"]}
    return {
        "rows": len(rows),
        "default_over_loop": figures(looped, lambda r: r["baselines"]["loop"]["ratio"]["value"], BELOW_LOOP),
        "default": figures(compiled, lambda r: r["ratio"]["value"], BELOW_FASTEST),
        "tuned": figures(tuned, lambda r: r["ratio"]["value"], BELOW_FASTEST),
        "not_measured": sorted(set(rows) - set(results)),
    }


def table(rows: Rows, columns: Sequence[str] = ()) -> str:
    """Returns the rows as a table in Markdown. columns: names of `COLUMNS`; empty for all."""
    return markdown(rows, COLUMNS, columns)


def reference_table(rows: Rows) -> str:
    """Returns rows of the reference networks with their notes, in the order of the suite."""
    order = [row.name for row in ROWS]
    found = dict(sorted(rows.items(), key=lambda item: order.index(item[0].partition(",")[0])))
    return "\n".join([markdown(found, REFERENCE), "", *notes(found, "Plans")])


def one_line(row: Row) -> str:
    """Returns the line that is printed when a row is done."""
    columns = [name for name in COLUMNS if name not in ("network", "N", "batch", "pattern", "threads")]
    return line_of(row, COLUMNS, columns)


def notes(rows: Rows, plans: str = "Default plans") -> Iterator[str]:
    """Yields the lines below the table: the machine, the versions, the summary, and other contestants.

    plans: the measured plans in words.
    """
    yield from places(rows)
    totals = summary(rows)
    other = "tuned" if totals["tuned"]["rows"] else "default"
    for name, words, below in (
        ("default_over_loop", f"{plans} over the eager loop", BELOW_LOOP),
        (other, f"{'Tuned plans' if other == 'tuned' else plans} over the fastest baseline", BELOW_FASTEST),
    ):
        if (found := totals[name])["rows"]:
            yield (
                f"{words}: {found['rows']} rows{_verdicts(found) if name == other else ''}, geometric mean "
                f"{found['geometric_mean']:.2f}, least {found['least']:.2f}; below {below}: "
                f"{'; '.join(found['below']) or 'none'}."
            )
    if totals["not_measured"]:
        yield f"Not measured, or refused as noisy: {'; '.join(totals['not_measured'])}."
    for key, row in rows.items():
        for name, other in (result_of(row) or {"others": {}})["others"].items():
            if not name.startswith("widepack["):
                times = f"{interval(other['over_ours'])} times as long as widepack"
                yield f"{key}: the {name} takes {duration(other['median_ms'])}, {times}."


def _verdicts(found: Row) -> str:
    return f" ({', '.join(f'{count} {verdict}' for verdict, count in found['verdicts'].items())})"


def _network(row: Row) -> str:
    dtype = [row["dtype"]] if "dtype" in row else []
    if "inputs" not in row:
        return ", ".join([row["title"], *dtype])
    sample = row["inputs"][0].partition("[")[2].partition("]")[0].split(",")[1:]
    count = row.get("parameters")
    parameters = [f"{count / 1e6:.3g} M parameters"] if count else []
    return f"{row['title']} ({', '.join([row['size'], 'x'.join(sample), *parameters, *dtype])})"


def _threads(row: Row) -> str:
    return str(row["threads"] if "threads" in row else environment_of(row)["threads"])


def _time(result: Row) -> str:
    return duration(result["median_ms"])


def _ratio(result: Row) -> str:
    return interval(result["ratio"]) if len(result["baselines"]) > 1 else ""


def _tuned(cell: Cell) -> Cell:
    return measured(lambda r: cell(r["others"][TUNED]) if TUNED in r["others"] else "")


def _share(result: Row) -> str:
    if TUNED in result["others"]:
        share = result["others"][TUNED]["share"]
    else:
        share = (result.get("roofline") or {}).get("share")
    return f"{share:.0%}" if share else ""


def _verdict(row: Row) -> str:
    result = result_of(row)
    return str(result["others"][TUNED]["verdict"]) if result and TUNED in result["others"] else verdict(row)


COLUMNS: Mapping[str, Cell] = {
    "network": _network,
    "N": lambda row: str(row["members"]),
    "batch": lambda row: str(row["batch"]),
    "pattern": lambda row: str(row.get("pattern", "shared")),
    "threads": _threads,
    "default": measured(_time),
    "over the loop": measured(over_loop),
    "tuned": _tuned(_time),
    "fastest baseline": measured(lambda r: fastest(r) if len(r["baselines"]) > 1 else ""),
    "default ratio": measured(_ratio),
    "tuned ratio": _tuned(lambda r: interval(r["ratio"])),
    "roofline": measured(_share),
    "verdict": _verdict,
}
"""The columns of the table, from a row of the document."""

REFERENCE: Mapping[str, Cell] = {
    **{name: COLUMNS[name] for name in ("network", "N", "batch", "threads")},
    "widepack": measured(_time),
    "fastest baseline": COLUMNS["fastest baseline"],
    "ratio": measured(_ratio),
    **{name: COLUMNS[name] for name in ("over the loop", "roofline", "verdict")},
}
"""The columns of the reference networks, which are tuned in place."""
