"""Writes how the cases of HFTA's tests end, from bench/results/hfta-cases.json."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from results import read, where

COLUMNS = ("cases", "right", "beyond", "refused", "wrong", "crash", "apart")


def table() -> str:
    """Returns a row for each layer and optimizer, the totals, and what is not run as in HFTA's tests."""
    document = read("hfta-cases")
    lines = [
        "| HFTA's test of | cases | right | beyond the bound | refused | wrong | crash | not run |",
        "|---|---|---|---|---|---|---|---|",
    ]
    total: Counter[str] = Counter()
    for family, row in document["counts"].items():
        total.update(row)
        lines.append(_row(family, row))
    mixed: Counter[str] = Counter()
    for row in document["mixed"].values():
        mixed.update(row)
    lines += [
        _row("all", total),
        _row("(random combinations of the layers' options)", mixed),
        "",
        f"- Not run: the {total['apart']} cases of the grids that need a CUDA device.",
        f"- {len(document['smaller'])} cases have fewer rows or channels than in HFTA's tests.",
        "- Beyond the bound: the gradient of a weight that is a long sum. One kernel of all members rounds "
        "it more than a member's own kernel does, by at most 32 ulp of its largest number.",
        "",
        where(document["environment"]),
    ]
    return "\n".join(lines)


def _row(name: str, row: Mapping[str, int]) -> str:
    return f"| {name} | {' | '.join(str(row[column]) for column in COLUMNS)} |"
