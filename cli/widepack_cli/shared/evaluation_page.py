"""Writes an evaluation as one HTML page: tables and SVG plots, without scripts or network.

Each plot is as wide as the screen of a phone, and its numbers stand in a table below it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from widepack_bench.report.html import table, whole
from widepack_bench.text import plural

if TYPE_CHECKING:
    from widepack import EvaluateReport

WIDTH, HEIGHT = 360, 300  # of a plot
_LEFT, _BOTTOM, _TOP, _RIGHT = 56, 40, 28, 14  # of its axes
_MOST = 200  # members in the table
_STYLE = """
.plots { display: flex; flex-wrap: wrap; gap: 0 1.5rem; } figure { margin: .6rem 0; max-width: 100%; }
figcaption { max-width: 22rem; color: var(--soft); } details { margin: .3rem 0 1rem; }
h1, .soft { overflow-wrap: anywhere; } svg polyline { fill: none; } svg .axis { stroke: var(--soft); }
@media (max-width: 40rem) { table { font-size: .75rem; } th, td { padding: .15rem .25rem; } }
"""
_WORDS = {
    "classes": "The accuracy is 1 at best, nll, brier and ece are 0. error_auroc says how well a small "
    "confidence finds wrong answers: 0.5 is no better than chance.",
    "numbers": "rmse and mae are 0 at best. error_rank is the rank correlation of the members' deviation "
    "with the absolute error: 1 at best.",
}
Point = tuple[float, float, float]
"""Where a dot is, from 0 to 1 each, and its share of the largest one."""


def page(report: EvaluateReport) -> str:
    """Returns the page of a report."""
    first = "nll" if report.kind == "classes" else "rmse"
    body = [
        f"<h1>{escape(report.path)}</h1>",
        f"<p>{plural(report.rows, 'row')}, {plural(len(report.members), 'member')}.</p>",
        f"<p class=soft>artifact {escape(report.digest)}<br>data sha256:{escape(report.sha256)}</p>",
        "<h2>Members and the ensemble</h2>",
        f"<p class=soft>{_WORDS[report.kind]}</p>",
        _members(report, first),
        "<h2>Fewer members</h2>",
        _curve(report.curve, first),
    ]
    if report.reliability:
        body += ["<h2>Reliability</h2>", _plots({"All rows": report.reliability}, _reliability)]
    if report.intervals:
        body += ["<h2>Intervals</h2>", _plots({"All rows": report.intervals}, _intervals)]
    if report.calibration is not None:
        body += _calibration(report.calibration)
    return whole(f"{report.path}: widepack evaluate", body, _STYLE)


def _members(report: EvaluateReport, first: str) -> str:
    names = list(report.ensemble)
    order = sorted(report.members, key=lambda m: report.members[m][first] or 0.0)
    rows = [("ensemble", report.ensemble), *((m, report.members[m]) for m in order[:_MOST])]
    found = table([["", *names], *([name, *(_text(f.get(n)) for n in names)] for name, f in rows)])
    more = len(order) - _MOST
    return found + (f"<p class=soft>and {more} more; --json has all</p>" if more > 0 else "")


def _calibration(c: Mapping[str, Any]) -> list[str]:
    """Returns the part about a calibration."""
    before, after = c["before"], c["after"]
    what = "temperature of the mean probabilities" if c["kind"] == "temperature" else "factor of the variance"
    names = [n for n in before if n not in ("reliability", "intervals")]
    draw = _reliability if c["kind"] == "temperature" else _intervals
    key = "reliability" if c["kind"] == "temperature" else "intervals"
    return [
        "<h2>Calibration</h2>",
        f"<p>A {what} of {c['value']:.4g}{', the bound,' if c['at_bound'] else ''} was fitted on "
        f"{plural(c['rows'], 'row')}. All figures here are of the other {c['held_out']}."
        f"{'' if c['improves'] else ' It does not improve their nll.'}</p>",
        table([["", "before", "after"], *([n, _text(before[n]), _text(after[n])] for n in names)]),
        _plots({"Before": before[key], "After": after[key]}, draw),
    ]


def _plots(rows: Mapping[str, Sequence[Mapping[str, Any]]], draw: Any) -> str:
    """Returns the plots of several tables, side by side where there is room."""
    return f"<div class=plots>{''.join(draw(title, one) for title, one in rows.items())}</div>"


def _reliability(title: str, bins: Sequence[Mapping[str, Any]]) -> str:
    some = [b for b in bins if b["count"]]
    most = max((b["count"] for b in some), default=1)
    points = [(b["confidence"], b["accuracy"], b["count"] / most) for b in some]
    head = ["confidence", "answers", "mean", "accuracy"]
    rows = [
        [
            f"{b['least']:.2f} to {b['most']:.2f}",
            str(b["count"]),
            f"{b['confidence']:.3f}",
            f"{b['accuracy']:.3f}",
        ]
        for b in some
    ]
    caption = "A dot is a range of confidence; its area is the number of answers. On the line both are equal."
    return _figure(f"{title}. {caption}", _diagonal(points, "mean confidence", "accuracy"), [head, *rows])


def _intervals(title: str, intervals: Sequence[Mapping[str, Any]]) -> str:
    points = [(i["level"], i["coverage"], 0.2) for i in intervals]
    head = ["level", "targets inside", "mean width"]
    rows = [[f"{i['level']:.0%}", f"{i['coverage']:.1%}", f"{i['width']:.4g}"] for i in intervals]
    caption = "A dot is a level. On the line the intervals contain as many targets as they say."
    return _figure(f"{title}. {caption}", _diagonal(points, "level", "targets inside"), [head, *rows])


def _figure(caption: str, svg: str, rows: Sequence[Sequence[str]]) -> str:
    return (
        f"<figure>{svg}<figcaption>{escape(caption)}</figcaption>"
        f"<details><summary>Numbers</summary>{table(rows)}</details></figure>"
    )


def _diagonal(points: Sequence[Point], across: str, up: str) -> str:
    """Draws points of the unit square, with its diagonal."""
    ticks = [(t / 4, f"{t / 4:g}") for t in range(5)]
    corners = [_at(0, 0), _at(1, 1)]
    shapes = [_line("base-line", corners), _line("ours-line", [_at(x, y) for x, y, _ in points])]
    shapes += [
        f'<circle class="ours" cx="{x:.1f}" cy="{y:.1f}" r="{2 + 6 * math.sqrt(share):.1f}"/>'
        for (x, y), share in ((_at(x, y), share) for x, y, share in points)
    ]
    return _svg(shapes, ticks, ticks, across, up)


def _curve(curve: Sequence[Mapping[str, Any]], first: str) -> str:
    """Draws a figure of ensembles of rising numbers of members."""
    values = [float(row[first]) for row in curve]
    low, high = min(values), max(values)
    span = (high - low) or abs(high) or 1.0
    last = math.log2(curve[-1]["members"]) or 1.0
    at = [_at(math.log2(row["members"]) / last, (v - low) / span) for row, v in zip(curve, values)]
    across = [(math.log2(row["members"]) / last, str(row["members"])) for row in curve]
    up = [((v - low) / span, f"{v:.4g}") for v in {low, high}]
    shapes = [_line("ours-line", at)]
    shapes += [f'<circle class="ours" cx="{x:.1f}" cy="{y:.1f}" r="4"/>' for x, y in at]
    rows = [["members", first], *([str(r["members"]), f"{v:.4g}"] for r, v in zip(curve, values))]
    caption = f"The mean {first} of ensembles of so many members, drawn ten times."
    return _figure(caption, _svg(shapes, across, up, "members", first), rows)


def _at(x: float, y: float) -> tuple[float, float]:
    """Returns the place of a point of the unit square."""
    return _LEFT + x * (WIDTH - _LEFT - _RIGHT), HEIGHT - _BOTTOM - y * (HEIGHT - _BOTTOM - _TOP)


def _line(name: str, points: Sequence[tuple[float, float]]) -> str:
    return f'<polyline class="{name}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'


def _svg(
    shapes: Sequence[str],
    across: Sequence[tuple[float, str]],
    up: Sequence[tuple[float, str]],
    x_label: str,
    y_label: str,
) -> str:
    """Returns a plot. across, up: the ticks of both axes, with their texts."""
    (left, bottom), (right, top) = _at(0, 0), _at(1, 1)
    parts = [_line("axis", [(left, top), (left, bottom), (right, bottom)])]
    for x, text in across:
        parts.append(
            f'<text class="soft" x="{_at(x, 0)[0]:.1f}" y="{bottom + 16}" text-anchor="middle">{text}</text>'
        )
    for y, text in up:
        parts.append(
            f'<text class="soft" x="{left - 6}" y="{_at(0, y)[1] + 4:.1f}" text-anchor="end">{text}</text>'
        )
    parts.append(f'<text x="{right}" y="{HEIGHT - 6}" text-anchor="end">{escape(x_label)}</text>')
    parts.append(f'<text x="4" y="14">{escape(y_label)}</text>')
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img" '
        f'aria-label="{escape(y_label)} over {escape(x_label)}">{"".join([*parts, *shapes])}</svg>'
    )


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
