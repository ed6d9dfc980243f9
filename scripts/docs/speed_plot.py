"""Draws docs/images/speed.svg from bench/results: speed over the number of members, and over the batch.

python scripts/docs/speed_plot.py      # needs matplotlib: pip install 'widepack[docs]'
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "docs" / "images" / "speed.svg"
NAMES = {
    "loop": "eager loop",
    "compiled-member": "compiled member, N calls",
    "compiled-loop": "compiled loop",
    "vmap": "vmap",
    "vmap-compiled": "compiled vmap",
    "onnxruntime": "ONNX Runtime, N sessions",
}
NETWORKS = {
    "mlp-b32": "MLP, N=100",
    "bert": "BERT, N=8",
    "vit": "ViT-S, N=8",
    "resnet18": "ResNet-18, N=10",
    "cnn1d": "1-D CNN, N=30",
}


def over_members() -> dict[str, list[tuple[int, float]]]:
    """Returns for each baseline: (N, geometric mean over all layers of its time over widepack's time)."""
    document = json.loads((ROOT / "bench/results/primitives-cpu.json").read_text(encoding="utf-8"))
    logs: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in document["rows"].values():
        for name, baseline in row.get("baselines", {}).items():
            if name in NAMES and baseline.get("median_ms"):
                logs[name][row["members"]].append(math.log(baseline["median_ms"] / row["median_ms"]))
    return {
        name: [(n, math.exp(sum(values) / len(values))) for n, values in sorted(by.items())]
        for name, by in sorted(logs.items(), key=lambda item: list(NAMES).index(item[0]))
    }


def over_batch() -> dict[str, list[tuple[int, float]]]:
    """Returns for some networks: (batch, time of the eager loop over the time by rules of thumb)."""
    rows = json.loads((ROOT / "bench/results/rules-cpu.json").read_text(encoding="utf-8"))["rows"]
    return {
        title: [(row["batch"], row["over_loop"]["by the rules"]) for row in rows[name]]
        for name, title in NETWORKS.items()
    }


def draw() -> None:
    """Writes the picture. The same data gives the same bytes."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import NullLocator, ScalarFormatter

    mpl.rcParams.update(
        {"svg.hashsalt": "widepack", "svg.fonttype": "none", "font.size": 10, "font.family": "sans-serif"}
    )
    figure, panels = plt.subplots(1, 2, figsize=(10.8, 4.2), layout="constrained")
    for panel, lines, axis, title in (
        (
            panels[0],
            over_members(),
            "members (N)",
            "layers of torch.nn: time of each baseline over widepack's",
        ),
        (panels[1], over_batch(), "batch", "networks: time of the eager loop over widepack's"),
    ):
        ticks: set[int] = set()
        for name, points in lines.items():
            xs, ys = zip(*points, strict=True)
            panel.plot(xs, ys, marker="o", markersize=4, label=NAMES.get(name, name))
            ticks.update(xs)
        _frame(panel, sorted(ticks), axis, title, ScalarFormatter, NullLocator)
    figure.savefig(OUT, metadata={"Date": None, "Creator": "scripts/docs/speed_plot.py"})


def _frame(panel: Any, ticks: list[int], axis: str, title: str, formatter: Any, locator: Any) -> None:
    panel.axhline(1, color="#888", linewidth=0.8)
    panel.set_xscale("log", base=2)
    panel.set_xticks(ticks)
    panel.xaxis.set_major_formatter(formatter())
    panel.xaxis.set_minor_locator(locator())
    panel.set_xlabel(axis)
    panel.set_ylabel("times as fast")
    panel.set_title(title, fontsize=10)
    panel.set_ylim(bottom=0)
    panel.grid(alpha=0.25)
    panel.legend(fontsize=8, frameon=False)


if __name__ == "__main__":
    draw()
