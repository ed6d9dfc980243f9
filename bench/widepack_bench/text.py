"""Formats columns, times and sizes as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligns rows of cells as lines: columns of numbers to the right, all others to the left. The first row
    is the head.
    """
    count = len(rows[0])
    widths = [max(len(row[i]) for row in rows) for i in range(count)]
    right = [
        all(row[i][:1].isdigit() or row[i] in ("", "-", "skipped") for row in rows[1:]) for i in range(count)
    ]
    return [
        "  ".join(
            c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in rows
    ]


def duration(milliseconds: float) -> str:
    """Formats a time with three digits and its unit: `35.2 us`, `1.24 ms`, `2.05 s`."""
    for limit, factor, unit in ((0.9995, 1000.0, "us"), (999.5, 1.0, "ms")):
        if milliseconds < limit:
            return f"{milliseconds * factor:#.3g}".rstrip(".") + f" {unit}"
    return (
        f"{milliseconds / 1000:#.3g}".rstrip(".") + " s"
        if milliseconds < 999_500
        else f"{milliseconds / 1000:.0f} s"
    )


def interval(ratio: Mapping[str, Any]) -> str:
    """Formats a value with its interval, as results have it in JSON: `1.59 [1.54, 1.65]`."""
    if ratio["value"] is None:
        return "too few rounds"
    high = "open" if ratio["high"] is None else f"{ratio['high']:.2f}"
    return f"{ratio['value']:.2f} [{ratio['low'] or 0:.2f}, {high}]"


def size(count: int) -> str:
    """Formats bytes with three digits and their unit (powers of 1000): `512 B`, `8.40 MB`."""
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{count} B" if unit == "B" else f"{value:#.3g}".rstrip(".") + f" {unit}"


def plural(count: int, noun: str) -> str:
    """Formats a count: `1 member`, `8 members`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
