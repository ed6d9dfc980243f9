"""Writes a report as one HTML page: tables and SVG plots, without scripts or network, in light and dark
colors.

The page uses only the report's JSON document: a stored document can be drawn again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from ..text import duration, size

WIDTH, LEFT, RIGHT, LINE = 860, 190, 180, 22  # Sizes of a plot in pixels: all, names, figures, one line.
RULES = {
    "holds": "widepack is not slower: the upper end of the 95% interval is at least 1.0, and the interval is "
    "narrower than 0.1. A ratio a little below 1 may hold: the interval then contains 1",
    "slower": "the whole 95% interval is below 1.0",
    "unclear": "the interval is not narrower than 0.1; give more time",
    "noisy": "refused: widepack against itself is too wide, or misses 1.0 by more than 0.02",
}
STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5b6675; --rule: #d5dae1; --back: #ffffff;
--ours: #0b6e4f; --other: #3f8f7a; --base: #8a94a3; --bad: #b3372f; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ee; --soft: #9aa5b4; --rule: #333c48; --back: #12161c; --ours: #3ecf9b;
  --other: #2a8f72; --base: #66717f; --bad: #ef7a71; }
}
body { margin: 2rem auto; max-width: 62rem; padding: 0 1rem; font: 15px/1.5 system-ui, sans-serif;
color: var(--ink); background: var(--back); }
.bars { max-width: 100%; overflow-x: auto; } .holds { color: var(--ours); }
@media (max-width: 40rem) {
  body { margin: 1rem auto; font-size: 14px; } h1 { overflow-wrap: anywhere; }
  .bars svg { max-width: none; min-width: 44rem; }
}
code { overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2.2rem; }
h3 { font-size: .95rem; margin: 1.2rem 0 .2rem; color: var(--soft); }
p, li { max-width: 56rem; } .soft, caption { color: var(--soft); } .bad { color: var(--bad); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .86rem; }
th, td { padding: .2rem .6rem; border-bottom: 1px solid var(--rule); text-align: right;
white-space: nowrap; } th:first-child, td:first-child { text-align: left; }
svg { max-width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; fill: var(--ink); }
svg .soft { fill: var(--soft); }
svg line { stroke: var(--soft); } svg .cut { fill: var(--soft); }
svg .rule { stroke: var(--rule); } svg .ours { fill: var(--ours); }
svg .other { fill: var(--other); } svg .base { fill: var(--base); }
svg .ours-line { stroke: var(--ours); stroke-width: 2; }
svg .base-line { stroke: var(--base); stroke-width: 2; }
"""


def page(document: Mapping[str, Any]) -> str:
    """Returns a report's page. document: a `widepack.bench/1` document."""
    env = document["environment"]
    who = (
        "every member sees the same inputs"
        if document["pattern"] == "shared"
        else "each member has its own inputs"
    )
    threads = env.get("threads", "?")
    body = [
        f"<h1>{escape(str(document['name']))}</h1>",
        f"<p>{document['members']} members, entry {escape(document['entry'])}, {who}. "
        f"{escape(str(env.get('device', '')))}, {threads} thread{'' if threads == 1 else 's'}, "
        f"{escape(', '.join(f'{k} {v}' for k, v in env.get('versions', {}).items()))}"
        f"{escape(', ' + env['date'] if env.get('date') else '')}. "
        f"Baselines run {escape(document['modules'])}.</p>",
        f"<p class=soft><code>{escape(str(env.get('command', '')))}</code></p>",
        *_summary(document),
    ]
    for row in document["rows"]:
        body += _row(row, document["members"])
    for batch, why in document["refused"].items():
        body.append(f"<h2>Batch {escape(batch)}</h2><p class=bad>Not measured: {escape(why)}</p>")
    start = document.get("start_up") or {}
    measured = {name: s["median_ms"] for name, s in start.items() if isinstance(s, dict)}
    if measured:
        body += [
            "<h2>Start-up</h2><p>From the start of a process to its first answer, "
            "<code>import torch</code> aside.</p>",
            bars(measured, duration),
        ]
    body += [
        f"<p class=soft>Start-up of {escape(n)}: {escape(s)}</p>"
        for n, s in start.items()
        if isinstance(s, str)
    ]
    return whole(f"{document['name']}: widepack bench", body)


def whole(title: str, body: Iterable[str], style: str = "") -> str:
    """Returns a page. title: of the window. body: HTML. style: beside `STYLE`."""
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, '
        f'initial-scale=1"><title>{escape(title)}</title>'
    )
    return (
        f"<!doctype html>\n<html lang=en><head>{head}<style>{STYLE}{style}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _summary(document: Mapping[str, Any]) -> list[str]:
    """Returns the verdict of every batch in one table, with the rule of each verdict."""
    rows = document["rows"]
    if not rows:
        return []
    cells = [
        [
            str(row["batch"]),
            duration(row["median_ms"]),
            f"{row['fastest']}, {duration(row['baselines'][row['fastest']]['median_ms'])}",
            _interval(row["ratio"]),
            row["verdict"],
        ]
        for row in rows
    ]
    head = ["batch", "widepack", "fastest baseline", "its time over widepack's", "verdict"]
    rules = "".join(
        f"<li><b class={name}>{name}</b>: {rule}</li>"
        for name, rule in RULES.items()
        if any(row["verdict"] == name for row in rows)
    )
    return ["<h2>Summary</h2>", table([head, *cells]), f"<ul class=soft>{rules}</ul>"]


def _row(row: Mapping[str, Any], members: int) -> list[str]:
    others, baselines = row["others"], row["baselines"]
    contestants = {"widepack": row, **others, **baselines}
    bad = "" if row["verdict"] == "holds" else " class=bad"
    sizes = ", ".join(f"{k} = {v}" for k, v in row["sizes"].items())
    body = [f"<h2>Batch {row['batch']}</h2>", f"<p{bad}>{escape(row['verdict'])}: {escape(row['why'])}</p>"]
    body.append(
        f"<p class=soft>{escape(sizes)}; A against A {_interval(row['noise'])} in {row['rounds']} rounds.</p>"
    )
    body.append("<h3>Time of a call: the median (bar), and the 95th and 99th percentile of single calls</h3>")
    body.append(
        bars(
            {n: c["median_ms"] for n, c in contestants.items()},
            duration,
            {n: c["latency"] for n, c in contestants.items()},
        )
    )
    body.append("<h3>How many times as long as widepack, with 95% intervals</h3>")
    body.append(
        intervals(
            {n: c["over_ours"] for n, c in others.items()} | {n: c["ratio"] for n, c in baselines.items()}
        )
    )
    roof = row.get("roofline")
    if roof:
        body.append(
            f"<p>{roof['share']:.0%} of the roofline: {roof['flop'] / 1e6:.4g} MFLOP take at "
            f"least {duration(roof['gemm_ms'])} at {roof['gemm_flop_per_s'] / 1e9:.3g} GFLOP/s, "
            f"{size(roof['least_bytes'])} of weights, inputs and outputs at least "
            f"{duration(roof['stream_ms'])} at {roof['stream_bytes_per_s'] / 1e9:.3g} GB/s.</p>"
        )
    memory = {n: m for n, m in row.get("memory", {}).items() if isinstance(m, dict)}
    head = [
        "",
        "median",
        "p50",
        "p95",
        "p99",
        "calls",
        "samples/s",
        "members' answers/s",
        *(["private memory", "mapped"] if memory else []),
    ]
    lines = []
    for name, c in contestants.items():
        lat = c["latency"]
        cells = [
            name,
            duration(c["median_ms"]),
            *(_time(lat[p]) for p in ("p50_ms", "p95_ms", "p99_ms")),
            str(lat["calls"]),
        ]
        cells += [f"{c['samples_per_s']:,.0f}", f"{c['answers_per_s']:,.0f}"]
        if memory:
            cells += (
                [size(memory[name][k]) for k in ("private_bytes", "mapped_bytes")]
                if name in memory
                else ["", ""]
            )
        lines.append(cells)
    body.append(table([head, *lines]))
    body += [
        f"<p class=soft>{escape(name)} was skipped: {escape(why)}</p>" for name, why in row["skipped"].items()
    ]
    return body


def table(rows: Sequence[Sequence[str]]) -> str:
    """Returns a table. The first row is the head."""
    head = "".join(f"<th>{escape(c)}</th>" for c in rows[0])
    lines = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in rows[1:])
    return f"<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>"


def bars(
    values: Mapping[str, float], text: Any, latency: Mapping[str, Mapping[str, Any]] | None = None
) -> str:
    """Draws horizontal bars from 0, with whiskers to the 95th and 99th percentile.

    The axis ends at three times the longest bar. A whisker that ends there has an arrow and its value.
    """
    longest = max(values.values())
    whiskers = [
        v for lat in (latency or {}).values() for v in (lat["p95_ms"], lat["p99_ms"]) if v is not None
    ]
    limit = min(max([longest, *whiskers]), 3 * longest)
    scale = (WIDTH - LEFT - RIGHT) / limit
    parts = []
    for i, (name, value) in enumerate(values.items()):
        y = i * LINE
        kind = (
            "ours" if name == "widepack" else "other" if name.startswith(("widepack", "level ")) else "base"
        )
        parts.append(f'<text x="{LEFT - 8}" y="{y + 15}" text-anchor="end">{escape(name)}</text>')
        parts.append(
            f'<rect class="{kind}" x="{LEFT}" y="{y + 4}" '
            f'width="{max(1.0, value * scale):.1f}" height="{LINE - 8}" rx="2"/>'
        )
        end, beyond = value, ""
        for percentile in ("p95_ms", "p99_ms"):
            at = (latency or {}).get(name, {}).get(percentile)
            if at is not None and at > limit:
                x, middle, end = LEFT + limit * scale, y + LINE / 2, limit
                parts.append(f'<path class="cut" d="M{x - 6:.1f} {middle - 5} l7 5 l-7 5 z"/>')
                beyond = beyond or f", {percentile[:3]} {text(at)}"
            elif at is not None and at > value:
                x = LEFT + min(at, limit) * scale
                parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y + 6}" y2="{y + LINE - 6}"/>')
                end = max(end, min(at, limit))
        if end > value:
            middle = y + LINE / 2
            parts.append(
                f'<line x1="{LEFT + value * scale:.1f}" x2="{LEFT + end * scale:.1f}" '
                f'y1="{middle}" y2="{middle}"/>'
            )
        parts.append(
            f'<text class="soft" x="{LEFT + end * scale + 8:.1f}" y="{y + 15}">'
            f"{escape(text(value) + beyond)}</text>"
        )
    return _svg(parts, len(values) * LINE)


def intervals(values: Mapping[str, Mapping[str, float | None]]) -> str:
    """Draws ratios as dots with intervals on a logarithmic axis. The line is 1: both are equally fast."""
    known = [v for row in values.values() for v in row.values() if v is not None and v > 0]
    if not known:
        return ""
    low, high = min(0.9, *known), max(1.1, *known)
    span = math.log(high) - math.log(low)

    def at(value: float) -> float:
        return LEFT + (math.log(max(value, low)) - math.log(low)) / span * (WIDTH - LEFT - RIGHT)

    ticks = [t for t in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if low <= t <= high]
    height = len(values) * LINE
    parts = [
        f'<line class="{"" if t == 1 else "rule"}" x1="{at(t):.1f}" x2="{at(t):.1f}" y1="0" y2="{height}"/>'
        for t in ticks
    ]
    parts += [
        f'<text class="soft" x="{at(t):.1f}" y="{height + 14}" text-anchor="middle">{t:g}</text>'
        for t in ticks
    ]
    for i, (name, row) in enumerate(values.items()):
        value, y = row["value"] or low, i * LINE + LINE / 2
        left, right = (row[k] if row[k] is not None else edge for k, edge in (("low", low), ("high", high)))
        assert left is not None and right is not None
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{escape(name)}</text>')
        parts.append(f'<line class="base-line" x1="{at(left):.1f}" x2="{at(right):.1f}" y1="{y}" y2="{y}"/>')
        parts.append(f'<circle class="ours" cx="{at(value):.1f}" cy="{y}" r="4"/>')
        parts.append(
            f'<text class="soft" x="{at(max(right, value)) + 8:.1f}" '
            f'y="{y + 4}">{escape(_interval(row))}</text>'
        )
    return _svg(parts, height + 18)


def _svg(parts: Sequence[str], height: float) -> str:
    return (
        f'<div class=bars><svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img">{"".join(parts)}</svg></div>'
    )


def _interval(row: Mapping[str, float | None]) -> str:
    value, low, high = (row[k] for k in ("value", "low", "high"))
    return (
        f"{value:.2f} [{low:.2f}, {'open' if high is None else f'{high:.2f}'}]"
        if value is not None and low is not None
        else "none"
    )


def _time(milliseconds: float | None) -> str:
    return "" if milliseconds is None else duration(milliseconds)
