"""Draws docs/images/data-flow.svg: the data flow from checkpoints to an artifact, and from an artifact to a
call.

python scripts/docs/data_flow.py
"""

from __future__ import annotations

from pathlib import Path

OUT = Path(__file__).resolve().parents[2] / "docs" / "images" / "data-flow.svg"

BUILD = (
    ("read", "N checkpoints,", "aligned"),
    ("capture", "one member,", "functional ATen"),
    ("kinds", "Shared, Stacked,", "Ragged"),
    ("simplify", "fold, merge,", "drop"),
    ("plan", "a strategy for", "each region"),
    ("lower", "one program for", "all members"),
    ("verify", "two", "comparisons"),
)
LOAD = (
    ("load", "manifest, weights", "mapped"),
    ("prologue", "derived weights,", "once"),
    ("probe", "recorded answers", "checked"),
    ("bind", "eager, aot, compile,", "onnxruntime"),
    ("call", "ens(x), ens.each(xs)", "[N, B, ...]"),
)
WIDTH, HEIGHT, GAP, BOX = 1080, 300, 20, 118


def box(x: float, y: float, width: float, lines: tuple[str, ...], kind: str) -> str:
    """Draws a box with a title and two lines."""
    middle = x + width / 2
    rest = "".join(
        f'<text x="{middle:g}" y="{y + 44 + 16 * i:g}" class="small">{line}</text>'
        for i, line in enumerate(lines[1:])
    )
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="74" rx="8" class="{kind}"/>'
        f'<text x="{middle:g}" y="{y + 24:g}" class="title">{lines[0]}</text>{rest}'
    )


def arrow(x: float, y: float, to: float) -> str:
    """Draws an arrow from left to right."""
    return f'<line x1="{x:g}" y1="{y:g}" x2="{to - 3:g}" y2="{y:g}" class="arrow" marker-end="url(#head)"/>'


def row(y: float, boxes: tuple[tuple[str, ...], ...], width: float, start: float) -> list[str]:
    """Draws boxes from left to right, with an arrow before each box except the first."""
    parts = []
    for i, lines in enumerate(boxes):
        x = start + i * (width + GAP)
        parts.append(box(x, y, width, lines, "step"))
        if i:
            parts.append(arrow(x - GAP, y + 37, x))
    return parts


def picture() -> str:
    """Returns the picture as SVG."""
    top, bottom = 40, 196
    left = row(top, BUILD, BOX, 12)
    end = 12 + 7 * BOX + 6 * GAP
    second = 178
    artifact = box(12, bottom, 140, ("ens.wide", "weights, programs,", "plans, probe"), "artifact")
    width = (WIDTH - 12 - (12 + 140 + GAP) - 4 * GAP) / 5
    right = row(bottom, LOAD, width, 12 + 140 + GAP)
    down = (
        f'<path d="M {end - BOX / 2:g} {top + 74} V {second - 24} H 82 V {bottom - 4}" '
        'class="arrow" fill="none" marker-end="url(#head)"/>'
    )
    style = (
        "text{font-family:system-ui,sans-serif;text-anchor:middle;fill:#1a237e}"
        ".title{font-size:15px;font-weight:600}.small{font-size:12px;fill:#333}"
        ".head{font-size:14px;text-anchor:start;fill:#555}"
        ".step{fill:#e8eaf6;stroke:#3f51b5}.artifact{fill:#fff3e0;stroke:#ef6c00}"
        ".arrow{stroke:#3f51b5;stroke-width:1.6}.page{fill:#fff}"
    )
    head = (
        '<marker id="head" markerWidth="8" markerHeight="8" refX="6" refY="3" orient="auto">'
        '<path d="M0,0 L6,3 L0,6 z" fill="#3f51b5"/></marker>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'aria-label="Checkpoints are read, captured, simplified, planned, lowered and '
        "verified into an artifact; "
        'an artifact is loaded, probed, bound to a backend and called.">'
        f"<style>{style}</style><defs>{head}</defs>"
        f'<rect width="{WIDTH}" height="{HEIGHT}" class="page"/>'
        '<text x="12" y="26" class="head">widepack build</text>'
        f'<text x="{12 + 140 + GAP}" y="{bottom - 14}" class="head">widepack.load</text>'
        + "".join([*left, down, arrow(12 + 140, bottom + 37, 12 + 140 + GAP), artifact, *right])
        + "</svg>\n"
    )


if __name__ == "__main__":
    OUT.write_text(picture(), encoding="utf-8")
