"""Writes the table of reductions from bench/results/reduce-cpu.json."""

from __future__ import annotations

from results import read
from widepack_bench.text import interval


def table() -> str:
    """Returns a row for each shape of answers: the times, their ratio, and the largest errors."""
    document = read("reduce-cpu")
    lines = [
        "| answers | classes in dim | `reduce` | torch expressions | ratio | largest error | theirs |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        shape = " x ".join(map(str, row["shape"]))
        ratio = interval(row["ratio"]) + ("" if row["quiet"] else " (noisy)")
        lines.append(
            f"| {shape} | {row['dim'] - 1} | {row['ms']:.3f} ms | {row['after_ms']:.3f} ms | {ratio} "
            f"| {max(row['error'].values()):.1e} | {max(row['error_after'].values()):.1e} |"
        )
    where = document["environment"]
    last = f"{where['date']}, {where['device']}, one thread, torch {where['versions']['torch']}."
    return "\n".join([*lines, "", last])
