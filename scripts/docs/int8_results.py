"""Writes the table of int8 weights from bench/results/int8-cpu.json."""

from __future__ import annotations

from results import read, where
from widepack_bench.text import interval


def table() -> str:
    """Returns a row for each model that ran over int8 weights: both times, their ratio, and the error."""
    rows = [row for row in read("int8-cpu")["rows"] if row["int8"]]
    lines = [
        "| model | N | rows for each member | int8 | fastest float32 plan | ratio | over the plan as built "
        "| error on the probe |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        ms, fastest = row["ms"], row["fastest"]
        ratio = interval(row["ratio"]) + ("" if row["quiet"] else " (noisy)")
        lines.append(
            f"| {row['model']} | {row['members']} | {row['rows']} | {ms['widepack']:.2f} ms "
            f"| {fastest}, {ms[fastest]:.2f} ms | {ratio} | {row['ratio_as_built']['value']:.2f} "
            f"| {row['error']['probe']:.1%} |"
        )
    return "\n".join([*lines, "", where(rows[0]["environment"])])
