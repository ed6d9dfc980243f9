"""Draws docs/images/as-built.svg, the first chart of README.md, from bench/results/as-built-cpu.json.

`result_pages.py` writes it. The same data gives the same bytes. Rows that are not valid are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import geometric_mean
from typing import Any
from xml.sax.saxutils import escape

from results import ROOT, part, ratio, rows_of
from widepack_bench.text import plural

CHART = ROOT / "docs" / "images" / "as-built.svg"
NAMES = {
    "tabular-512": "MLP, width 512",
    "tabular-256": "MLP, width 256",
    "gru-160": "GRU, width 160",
    "lstm-128": "LSTM, width 128",
    "mobilenet": "MobileNet, 96x96",
    "resnet-18": "ResNet-18, 64x64",
    "encoder-256": "encoder, width 256",
    "encoder-768": "encoder, width 768",
    "vit-384": "ViT-S, 96x96",
    "convnext": "ConvNeXt, 64x64",
    "tcn-64": "TCN, width 64",
    "mixer-128": "MLP-Mixer, 64x64",
}
"""Networks by the name that people know. Others have the name of the document."""
SERIES = {"ratio": "the fastest alternative", "over_loop": "a loop over the models"}
WIDTH, LEFT, RIGHT, TOP, ROW, BAR = 560, 178, 44, 78, 40, 12
STYLE = """
text{font:13px system-ui,sans-serif;fill:#1f2328}.s{font-size:12px;fill:#59636e}.c{fill:#fff}
.one{stroke:#59636e;stroke-dasharray:3 3}.ratio{fill:#3f51b5}.over_loop{fill:#a9b4c4}
@media (prefers-color-scheme:dark){text{fill:#f0f6fc}.s{fill:#9198a1}.c{fill:#0d1117}
.one{stroke:#9198a1}.ratio{fill:#8c9eff}.over_loop{fill:#56606c}}
""".replace("\n", "")


def measured(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the rows of one thread and of the same inputs for all models."""
    return [row for row in rows_of(document) if row["threads"] == 1 and row["call"] == "shared"]


def drawn(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns those of them that are valid."""
    return [row for row in measured(document) if row["valid"]]


def chart(document: Mapping[str, Any]) -> str:
    """Returns the chart as SVG: for each row how many times as fast the artifact is as built.

    Args:
        document: What `scripts/measure/as_built.py` wrote.
    """
    rows = drawn(document)
    most = max([1.0, *(row[key]["value"] for row in rows for key in SERIES)])
    scale = (WIDTH - LEFT - RIGHT) / most
    height = TOP + ROW * len(rows) + 12
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{title(document)}</title><style>{STYLE}</style>",
        f'<rect class="c" width="{WIDTH}" height="{height}" rx="6"/>',
        f'<text x="12" y="24">How many times as fast as ...</text>{_legend()}',
        f'<text class="s" x="12" y="66">{escape(_place(document))}</text>',
    ]
    for k, row in enumerate(rows):
        y = TOP + ROW * k
        words = f"{plural(row['members'], 'model')}, batch {row['batch']}"
        name = NAMES.get(row["network"], row["network"])
        lines.append(f'<text x="12" y="{y + 15}">{escape(name)}</text>')
        lines.append(f'<text class="s" x="12" y="{y + 30}">{escape(words)}</text>')
        for n, key in enumerate(SERIES):
            value, at = row[key]["value"], y + 4 + n * (BAR + 3)
            lines.append(
                f'<rect class="{key}" x="{LEFT}" y="{at}" width="{value * scale:.1f}" height="{BAR}" rx="2">'
                f"<title>{ratio(row[key])}</title></rect>"
                f'<text class="s" x="{LEFT + value * scale + 5:.1f}" y="{at + 11}">{value:.2f}</text>'
            )
    at = LEFT + scale
    lines.append(f'<line class="one" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP - 2}" y2="{height - 8}"/>')
    return "\n".join([*lines, "</svg>", ""])


def title(document: Mapping[str, Any]) -> str:
    """Returns what the chart shows, for those who do not see it."""
    return f"widepack beside the fastest alternative and a loop, {document['environment']['date']}"


def _place(document: Mapping[str, Any]) -> str:
    environment = document["environment"]
    torch = environment["versions"]["torch"]
    return f"{environment['date']}, {environment['device']}, one thread, torch {torch}. 1 is as fast."


def _legend() -> str:
    """Returns a square and a name for each series."""
    parts, x = [], 12
    for key, name in SERIES.items():
        parts.append(f'<rect class="{key}" x="{x}" y="36" width="12" height="12" rx="2"/>')
        parts.append(f'<text x="{x + 18}" y="47">{name}</text>')
        x += 190
    return "".join(parts)


@part("as-built-line", "as-built-cpu", "scripts/measure/as_built.py", place=False)
def line(document: Any) -> str:
    """Returns the sentences below the chart."""
    rows, environment = drawn(document), document["environment"]
    ratios, loops = ([row[key]["value"] for row in rows] for key in SERIES)
    networks = len({row["network"] for row in rows})
    left_out = [row["ratio"]["value"] for row in measured(document) if not row["valid"]]
    sessions = sum(row["fastest"] == "onnxruntime" for row in rows)
    fastest = "the fastest alternative"
    noisy = (
        f" {len(left_out)} of {len(measured(document))} measured rows do not count, because they were too "
        f"noisy: {min(left_out):.2f} to {max(left_out):.2f} times as fast as {fastest}."
        if left_out
        else ""
    )
    return (
        f"On {networks} networks ({plural(len(rows), 'row')}, each of a number of models and a batch), what "
        f"`widepack build` writes is {min(loops):.1f} to {max(loops):.1f} times as fast as a loop over the "
        f"models, and {min(ratios):.2f} to {max(ratios):.2f} times as fast as {fastest} (geometric mean "
        f"{geometric_mean(ratios):.2f}). In {sessions} of {plural(len(rows), 'row')} {fastest} is ONNX "
        f"Runtime with a session for each model.{noisy} One thread, {environment['device']}, "
        f"{environment['date']}."
    )
