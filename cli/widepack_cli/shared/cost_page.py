"""Writes costs as one HTML page: totals, a treemap of the layers and a roofline plot, without scripts or
network.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from widepack_artifacts.costs import CostRow, Costs
from widepack_artifacts.formulas import Number
from widepack_bench.report.html import whole
from widepack_bench.text import duration

from .cost_groups import Group
from .cost_lines import device_lines, title, totals, uncounted
from .cost_times import Roofline
from .treemap import Box, squarified

WIDTH, TREE, PLOT = 860, 420, 360  # pixels: of both pictures, and their heights
_LEFT, _BOTTOM = 70, 40  # of the axes
_LEGIBLE = 46  # a box of less width or half this height has no text
_NAMED = 4  # dots of the roofline plot that have their names beside them
_MORE_STYLE = """
svg .compute { fill: var(--ours); } svg .bytes { fill: var(--base); }
svg .compute, svg .bytes { stroke: var(--back); fill-opacity: .8; }
svg .box { fill: #fff; } pre { overflow-x: auto; font-size: .86rem; }
"""


def page(
    costs: Costs,
    found: Sequence[Group],
    values: Mapping[str, Number],
    roofline: Roofline,
    subject: str,
    entry: str,
) -> str:
    """Returns the page. found: the groups by layer. values: of the names in formulas."""
    at = ", ".join(f"{name}={n}" for name, n in values.items())
    leaves = [(g, own) for g in found if (own := _own(g))]
    text = "\n".join([*totals(costs, values), "", *device_lines(costs, roofline), *uncounted(costs)])
    body = [
        f"<h1>{escape(subject)}</h1>",
        *(f"<p class=soft>{escape(line)}</p>" for line in [*title(costs, subject, entry), f"at {at}"]),
        f"<pre>{escape(text)}</pre>",
        "<h2>Where the time goes</h2>",
        "<p>The area of a box is the least time of a layer, without the layers inside it. Green: computing "
        "bounds most of it. Gray: moving bytes does.</p>",
        _treemap(leaves, roofline),
        "<h2>Roofline</h2>",
        "<p>A dot is a layer, without the layers inside it, and its area is the least time. Under the slope "
        "bytes bound a layer, under the flat line computing does.</p>",
        _plot(leaves, roofline, costs.dtype),
    ]
    return whole(f"{subject}: widepack analyze", body, _MORE_STYLE)


def _own(group: Group) -> list[CostRow]:
    """Returns the rows of a layer that are in no layer inside it."""
    return [r for r in group.rows if (r.module in group.paths if group.depth else not r.module)]


def _name(group: Group) -> str:
    """Returns the name of a layer. Groups such as `body.*` of several classes have one label."""
    return f"{group.label} ({group.class_name})" if group.class_name else group.label


def _treemap(leaves: Sequence[tuple[Group, list[CostRow]]], roofline: Roofline) -> str:
    timed = [(g, time) for g, own in leaves if (time := roofline.time(own)).seconds > 0]
    timed.sort(key=lambda row: -row[1].seconds)
    whole = sum(time.seconds for _, time in timed)
    shapes = []
    for (group, time), box in zip(timed, squarified([t.seconds for _, t in timed], Box(0, 0, WIDTH, TREE))):
        name = escape(_name(group))
        share = 100 * time.seconds / whole
        about = f"{name}: {duration(1000 * time.seconds)}, {share:.1f}%, bound by {time.bound}"
        text = ""
        if box.width > _LEGIBLE and box.height > _LEGIBLE / 2:
            short = escape(_shortened(_name(group), int(box.width / 7)))
            text = f'<text class=box x="{box.x + 5:.1f}" y="{box.y + 16:.1f}">{short}</text>'
        shapes.append(
            f'<g><title>{about}</title><rect class={time.bound} x="{box.x:.1f}" y="{box.y:.1f}" '
            f'width="{box.width:.1f}" height="{box.height:.1f}"/>{text}</g>'
        )
    return _svg(TREE, shapes)


def _plot(leaves: Sequence[tuple[Group, list[CostRow]]], roofline: Roofline, dtype: str) -> str:
    """Returns FLOP/s over FLOP for each byte, both on logarithmic axes."""
    device = roofline.device
    peak, bandwidth = device.flops[dtype], device.bandwidth
    dots = []
    for group, own in leaves:
        flops = sum(roofline.point(r)[0] for r in own)
        moved = sum(roofline.point(r)[1] for r in own)
        if flops > 0 and moved > 0:
            dots.append((group, flops / moved, roofline.time(own)))
    ridge = peak / bandwidth
    low = min([ridge, *(x for _, x, _ in dots)]) / 4
    high = max([ridge, *(x for _, x, _ in dots)]) * 4
    floor, roof = min(bandwidth * low, peak) / 2, peak * 2

    def place(intensity: float, rate: float) -> tuple[float, float]:
        right = (math.log(intensity) - math.log(low)) / (math.log(high) - math.log(low))
        up = (math.log(rate) - math.log(floor)) / (math.log(roof) - math.log(floor))
        return _LEFT + right * (WIDTH - _LEFT - 20), PLOT - _BOTTOM - up * (PLOT - _BOTTOM - 20)

    points = [place(low, bandwidth * low), place(ridge, peak), place(high, peak)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    shapes = [
        f'<polyline class=ours-line fill=none points="{path}"/>',
        f'<text class=soft x="{_LEFT}" y="{PLOT - 8}">FLOP for each byte: {low:.2g} to {high:.2g}</text>',
        f'<text class=soft x="4" y="14">{peak / 1e12:.3g} TFLOP/s</text>',
    ]
    longest = max((t.seconds for _, _, t in dots), default=1.0)
    for i, (group, intensity, time) in enumerate(sorted(dots, key=lambda d: -d[2].seconds)):
        x, y = place(intensity, min(peak, bandwidth * intensity))
        radius = 3 + 14 * math.sqrt(time.seconds / longest)
        about = escape(f"{_name(group)}: {intensity:.3g} FLOP/byte, {duration(1000 * time.seconds)}")
        shapes.append(
            f'<g><title>{about}</title><circle class={time.bound} cx="{x:.1f}" cy="{y:.1f}" '
            f'r="{radius:.1f}"/></g>'
        )
        if i < _NAMED:
            label = escape(_shortened(_name(group), 40))
            shapes.append(
                f'<text class=soft x="{x + 4:.1f}" y="{y + radius + 14 + 14 * (i % 3):.1f}">{label}</text>'
            )
    return _svg(PLOT, shapes)


def _svg(height: int, shapes: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role=img>' + "\n".join(shapes) + "</svg>"


def _shortened(text: str, count: int) -> str:
    return text if len(text) <= count else f"...{text[len(text) - count + 3 :]}" if count > 6 else ""
