"""Writes the results of the suite `training` as text: a summary, and the table."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..text import duration, interval

Rows = Mapping[str, Mapping[str, Any]]


def summary(rows: Rows) -> dict[str, Any]:
    """Summarizes the rows that were measured and quiet enough.

    over_loop: the fused module against the loop. over_uncompiled: against the fastest baseline without
    compilation. over_fastest: the faster of the fused module and its compiled form, against the fastest of
    all baselines.
    """
    quiet = {k: r["result"] for k, r in rows.items() if "result" in r and r["result"]["verdict"] != "noisy"}
    fastest = {key: best(r) for key, r in quiet.items()}
    plain = {k: _least(r, lambda name: "compiled" not in name) for k, r in quiet.items()}
    loop = {k: _least(r, lambda name: name == "loop") for k, r in quiet.items()}
    return {
        "rows": len(rows),
        "verdicts": dict(Counter(r["verdict"] for r in quiet.values())),
        "over_loop": _figures(loop),
        "over_uncompiled": _figures(plain),
        "over_fastest": _figures(fastest),
        "below_1": sorted(key for key, ratio in fastest.items() if ratio < 1),
        "not_measured": sorted(set(rows) - set(quiet)),
    }


def best(result: Mapping[str, Any]) -> float:
    """Returns the ratio of the fastest baseline to the faster of the fused module and its compiled form."""
    ratios = [result["ratio"], *(other["ratio"] for other in result["others"].values())]
    return float(max(ratio["value"] for ratio in ratios))


def _least(result: Mapping[str, Any], among: Callable[[str], bool]) -> float:
    """Returns the ratio of the fastest of some baselines; NaN if there is none."""
    ratios = [t["ratio"]["value"] for name, t in result["baselines"].items() if among(name)]
    return float(min(ratios, default=math.nan))


def _figures(all_ratios: Mapping[str, float]) -> dict[str, Any]:
    """Returns the number of ratios, their geometric mean and the least."""
    ratios = {key: ratio for key, ratio in all_ratios.items() if not math.isnan(ratio)}
    if not ratios:
        return {"rows": 0, "geometric_mean": None, "least": None}
    mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
    return {"rows": len(ratios), "geometric_mean": mean, "least": min(ratios.values())}


def training_table(rows: Rows, columns: Sequence[str] = ()) -> str:
    """Returns the rows as a table in Markdown. columns: names of `COLUMNS`; empty for all."""
    names = list(columns or COLUMNS)
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(COLUMNS[n](row) for n in names) + " |" for row in rows.values()]
    return "\n".join(lines)


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
    return " | ".join(f"{n} {cell}" for n in names if (cell := COLUMNS[n](row)))


def _measured(cell: Callable[[Mapping[str, Any]], str]) -> Callable[[Mapping[str, Any]], str]:
    """Returns the cell of a row that is empty where nothing was measured."""
    return lambda row: cell(row["result"]) if "result" in row else ""


def _loop(result: Mapping[str, Any]) -> str:
    loop = result["baselines"].get("loop")
    return interval(loop["ratio"]) if loop else ""


def _compiled(cell: Callable[[Mapping[str, Any]], str]) -> Callable[[Mapping[str, Any]], str]:
    """Returns the cell of the compiled fused module."""
    return _measured(lambda r: "".join(cell(other) for other in r["others"].values()))


def _verdict(row: Mapping[str, Any]) -> str:
    return str(row["result"]["verdict"]) if "result" in row else f"error: {row.get('error', '')[:120]}"


COLUMNS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "network": lambda row: f"{row['title']} ({row['size']})",
    "N": lambda row: str(row["members"]),
    "batch": lambda row: str(row["batch"]),
    "inputs": lambda row: "one batch for all" if row["pattern"] == "shared" else "a batch for each",
    "widepack": _measured(lambda r: duration(r["median_ms"])),
    "compiled": _compiled(lambda other: duration(other["median_ms"])),
    "fastest baseline": _measured(
        lambda r: (
            f"{r['fastest']}, {duration(r['baselines'][r['fastest']]['median_ms'])}, of {len(r['baselines'])}"
        )
    ),
    "ratio": _measured(lambda r: interval(r["ratio"])),
    "compiled ratio": _compiled(lambda other: interval(other["ratio"])),
    "over the loop": _measured(_loop),
    "verdict": _verdict,
}
"""The columns of the table, from a row of the document."""
