"""Writes the results of routing rows to members."""

from __future__ import annotations

import math
from typing import Any

from results import read


def route() -> str:
    """Returns the times of `ens.route` beside those of the fastest baseline."""
    document = read("route-cpu")
    lines = [
        "| network | members | rows | ids | members with rows | route | fastest baseline | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        ratio = row["ratio"]
        high = "" if ratio["high"] is None else f"{ratio['high']:.2f}"
        lines.append(
            f"| {row['network']} | {row['members']} | {row['batch']} | {row['ids']} | {row['active']} "
            f"| {_time(row['ms'])} | {row['fastest']}, {_time(row['baselines_ms'][row['fastest']])} "
            f"| {ratio['value']:.2f} [{ratio['low']:.2f}, {high}]{'' if row['quiet'] else ', noisy'} |"
        )
    many = [r for r in document["rows"] if r["active"] >= 8]
    lines += [
        "",
        f"Geometric mean of the rows with 8 members or more: {_mean(many, 'ratio'):.2f} over the fastest "
        f"baseline, {_mean(many, 'over_dict'):.2f} over the better one of `dict` and `sorted`.",
    ]
    return "\n".join([*lines, "", _machine(document)])


def suite() -> str:
    """Returns, for each network of the suites, the lowest and the mean ratio of its rows."""
    document = read("route-suite-cpu")
    measured = [r for r in document["rows"] if "ratio" in r]
    lines = [
        "| network | members | rows measured | lowest ratio | its rows, ids | geometric mean |",
        "|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(r["name"] for r in measured):
        rows = [r for r in measured if r["name"] == name]
        low = min(rows, key=lambda r: r["ratio"]["value"])
        lines.append(
            f"| {low['network']} | {low['members']} | {len(rows)} | {low['ratio']['value']:.2f} against "
            f"{low['fastest']}{'' if low['quiet'] else ', noisy'} | {low['batch']}, {low['ids']} "
            f"| {_mean(rows, 'ratio'):.2f} |"
        )
    held = [r for r in measured if r["ratio"]["value"] >= 1 / 1.05]
    left = len(document["rows"]) - len(measured)
    lines += [
        "",
        f"{len(held)} of {len(measured)} rows take at most 1.05 times as long as the fastest baseline; "
        f"geometric mean {_mean(measured, 'ratio'):.2f}. {left} rows with longer calls were left out.",
    ]
    return "\n".join([*lines, "", _machine(document)])


def _machine(document: dict[str, Any]) -> str:
    environment = document["environment"]
    torch = environment["versions"]["torch"]
    return f"{environment['date']}, {environment['device']}, one thread, torch {torch}."


def _mean(rows: list[dict[str, Any]], key: str) -> float:
    return math.exp(sum(math.log(r[key]["value"]) for r in rows) / len(rows))


def _time(ms: float) -> str:
    return f"{ms:.3g} ms" if ms >= 1 else f"{ms * 1e3:.3g} us"
