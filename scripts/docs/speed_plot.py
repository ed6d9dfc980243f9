"""Draws docs/images/speed.svg from bench/results: speed over the number of members, and over the batch.

python scripts/docs/speed_plot.py      # needs matplotlib: pip install 'widepack[docs]'
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path

from plots import frame_ratios, panels, save

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
    figure, both = panels(2)
    for panel, lines, axis, title in (
        (
            both[0],
            over_members(),
            "members (N)",
            "layers of torch.nn: time of each baseline over widepack's",
        ),
        (both[1], over_batch(), "batch", "networks: time of the eager loop over widepack's"),
    ):
        ticks: set[int] = set()
        for name, points in lines.items():
            xs, ys = zip(*points, strict=True)
            panel.plot(xs, ys, marker="o", markersize=4, label=NAMES.get(name, name))
            ticks.update(xs)
        frame_ratios(panel, sorted(ticks), axis, title)
    save(figure, OUT, "scripts/docs/speed_plot.py")


if __name__ == "__main__":
    draw()
