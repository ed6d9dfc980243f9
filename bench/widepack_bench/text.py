"""Columns, times and sizes as a person reads them."""

from __future__ import annotations

from collections.abc import Sequence


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells, the first one their heads, as aligned lines: columns of figures to the right, all others to the left."""
    count = len(rows[0])
    widths = [max(len(row[i]) for row in rows) for i in range(count)]
    right = [all(row[i][:1].isdigit() or row[i] in ("", "-", "skipped") for row in rows[1:]) for i in range(count)]
    return ["  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)).rstrip() for row in rows]


def duration(milliseconds: float) -> str:
    """A time in three digits with its unit: `35.2 us`, `1.24 ms`, `2.05 s`."""
    for limit, factor, unit in ((0.9995, 1000.0, "us"), (999.5, 1.0, "ms")):
        if milliseconds < limit:
            return f"{milliseconds * factor:#.3g}".rstrip(".") + f" {unit}"
    return f"{milliseconds / 1000:#.3g}".rstrip(".") + " s" if milliseconds < 999_500 else f"{milliseconds / 1000:.0f} s"


def size(count: int) -> str:
    """Bytes in three digits with their unit (powers of 1000): `512 B`, `8.40 MB`."""
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{count} B" if unit == "B" else f"{value:#.3g}".rstrip(".") + f" {unit}"


def plural(count: int, noun: str) -> str:
    """`1 member`, `8 members`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
