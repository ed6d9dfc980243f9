"""Writes the table of cascades from bench/results/cascade-digits.json."""

from __future__ import annotations

from results import read


def table() -> str:
    """Returns a row for all members, the selected ones, and each cascade."""
    document = read("cascade-digits")
    found, members = document["summary"], 16
    rows = [("all members", found["all"], 1.0), ("one member, on average", found["mean_member"], 1 / members)]
    names = (("fitted", "the cascade that `select` fitted"), ("first_3_until_0.9", "`first=3, until=0.9`"))
    rows += [(name, found[key]["accuracy"], found[key]["calls"]) for key, name in names]
    lines = ["| what runs | accuracy | part of the member calls |", "|---|---|---|"]
    lines += [f"| {name} | {100 * accuracy:.2f}% | {100 * calls:.0f}% |" for name, accuracy, calls in rows]
    lines.append(f"| the selected members | {100 * found['selected']:.2f}% | |")
    where = document["environment"]
    last = f"{found['splits']} splits, {where['date']}, torch {where['versions']['torch']}."
    return "\n".join([*lines, "", last])
