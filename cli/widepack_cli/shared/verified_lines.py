"""Says what a build verified, from its record in the manifest. No torch is imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from widepack_bench.text import plural


class LargestError(NamedTuple):
    """The largest errors of one output: of the wide programs, and of the members themselves.

    scale: the rms of the float64 answers.
    """

    wide: float
    own: float
    scale: float


def largest_errors(record: Mapping[str, Any]) -> dict[str, LargestError]:
    """Returns the largest errors of an entry by output. record: of one entry."""
    worst: dict[str, LargestError] = {}
    for rows in record.get("wide", {}).values():
        for row in rows:
            errors = [float(m.get("max", 0.0)) for m in row.get("members", {}).values()]
            before = worst.get(row.get("output", ""), LargestError(0.0, 0.0, 0.0))
            worst[row.get("output", "")] = LargestError(
                max([before.wide, *errors]),
                max(before.own, float(row.get("own_max", 0.0))),
                max(before.scale, float(row.get("scale", 0.0))),
            )
    return worst


def record_lines(record: Mapping[str, Any], entry: str) -> list[str]:
    """Returns what was compared, and the largest errors of each output. record: of one entry."""
    text = [
        f"{entry and entry.strip() + ': '}{plural(len(record.get('calls', [])), 'call')} "
        f"of every member and program against {record.get('truth', 'float64')}, torch "
        f"{record.get('torch', '?')}"
    ]
    return text + [
        f"{entry}{name or 'output'}: largest error {e.wide:.2e}; of the members themselves {e.own:.2e}"
        for name, e in largest_errors(record).items()
    ]


def verified_line(verification: Mapping[str, Any]) -> str:
    """Returns one line for people about all entries; "" without a record.

    Of several outputs it has the errors of the one that is furthest off for the size of its answers.
    """
    records = [verification, *verification.get("entries", {}).values()]
    errors = [error for record in records for error in largest_errors(record).values()]
    if not errors:
        return ""
    calls = sum(len(record.get("calls", [])) for record in records)
    furthest = max(errors, key=lambda e: e.wide / e.scale if e.scale else 0.0)
    truth = str(verification.get("truth", "float64")).partition(" ")[0]
    off = (
        "the answers are equal"
        if furthest.wide == furthest.own == 0
        else f"off by at most {furthest.wide:.2g}, your own models by {furthest.own:.2g} "
        "(accepted: about 4 times your models' error)"
    )
    return f"verified     {plural(calls, 'call')} of every member against {truth}: {off}"
