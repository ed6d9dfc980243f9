"""Draws docs/images/speed.svg and docs/images/fleets.svg from bench/results. The same data gives the same
bytes.

python scripts/docs/plots.py      # needs matplotlib: pip install 'widepack[docs]'
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import geometric_mean as mean
from typing import Any

from results import ROOT, read, rows_of
from widepack_bench.text import plural

SPEED, FLEETS = (ROOT / "docs" / "images" / f"{name}.svg" for name in ("speed", "fleets"))
BASELINES = {
    "loop": "eager loop",
    "compiled-member": "compiled member, N calls",
    "compiled-loop": "compiled loop",
    "vmap": "vmap",
    "vmap-compiled": "compiled vmap",
    "onnxruntime": "ONNX Runtime, N sessions",
}
NETWORKS = {
    "resnet18-64": "ResNet-18, 64x64",
    "tabular-mlp": "tabular MLP",
    "mobilenetv3": "MobileNetV3-Large",
    "ft-transformer": "FT-Transformer",
    "lstm-forecaster": "LSTM forecaster",
}
MEMBERS = 8  # of the networks
LEAST = ', memory="least"'
RATIOS = {"ratio": "", "ratio_least": LEAST}
MEMORY = {"merged": "whole weights", "fleet": "fleet", "fleet_least": f"fleet{LEAST}"}

Lines = Mapping[str, Sequence[tuple[int, float]]]


def over_members() -> Lines:
    """Returns for each baseline: (N, geometric mean over all layers of its time over widepack's time)."""
    found: dict[str, dict[int, list[float]]] = {name: {} for name in BASELINES}
    for row in read("primitives-cpu")["rows"].values():
        for name, baseline in row.get("baselines", {}).items():
            if name in found and baseline.get("median_ms"):
                ratio = baseline["median_ms"] / row["median_ms"]
                found[name].setdefault(row["members"], []).append(ratio)
    return {name: [(n, mean(values)) for n, values in sorted(by.items())] for name, by in found.items()}


def over_batch() -> Lines:
    """Returns for some networks: (batch, time of the eager loop over that of the artifact as built)."""
    rows = [r for r in rows_of(read("real-cpu")) if r["members"] == MEMBERS and "result" in r]
    return {
        title: [
            (row["batch"], row["result"]["baselines"]["loop"]["ratio"]["value"])
            for row in sorted(rows, key=lambda row: row["batch"])
            if row["network"] == name and row["threads"] == 1
        ]
        for name, title in NETWORKS.items()
    }


def _fleet(row: Mapping[str, Any]) -> str:
    return f"N={row['members']}, {plural(row['layers'], 'layer')}"


def over_rows() -> Lines:
    """Returns for each fleet: (rows a member, time of the artifact of whole weights over the fleet's)."""
    return {
        _fleet(row) + words: [(call["rows"], call[key]) for call in row["calls"]]
        for row in rows_of(read("fleets-cpu"))
        for key, words in RATIOS.items()
    }


def memory() -> dict[str, dict[str, float]]:
    """Returns for each fleet, and each way to load it: the memory after a call of one row, in MB."""
    return {
        _fleet(row): {name: row["memory"][name]["resident"] / 1e6 for name in MEMORY}
        for row in rows_of(read("fleets-cpu"))
    }


def _panels() -> tuple[Any, Any]:
    """Returns a figure of matplotlib with two panels side by side, and the panels."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    mpl.rcParams.update({"svg.hashsalt": "widepack", "svg.fonttype": "none"})
    mpl.rcParams.update({"font.size": 10, "font.family": "sans-serif"})
    found: tuple[Any, Any] = plt.subplots(1, 2, figsize=(10.8, 4.2), layout="constrained")
    return found


def _draw_ratios(panel: Any, lines: Lines, axis: str, title: str, names: Mapping[str, str]) -> None:
    """Draws ratios over numbers that double. Two lines of one fleet have one color."""
    from matplotlib.ticker import NullLocator, ScalarFormatter

    colors: dict[str, str] = {}
    ticks: set[int] = set()
    for name, points in lines.items():
        xs, ys = zip(*points, strict=True)
        color = colors.setdefault(name.removesuffix(LEAST), f"C{len(colors)}")
        style = "--" if name.endswith(LEAST) else "-"
        label = names.get(name, name)
        panel.plot(xs, ys, marker="o", markersize=4, label=label, color=color, linestyle=style)
        ticks.update(xs)
    panel.axhline(1, color="#888", linewidth=0.8)
    panel.set_xscale("log", base=2)
    panel.set_xticks(sorted(ticks))
    panel.xaxis.set_major_formatter(ScalarFormatter())
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_xlabel(axis)
    panel.set_ylabel("times as fast")
    panel.set_title(title, fontsize=10)
    panel.set_ylim(bottom=0)
    panel.grid(alpha=0.25)
    panel.legend(fontsize=8, frameon=False)


def _draw_memory(panel: Any) -> None:
    for k, (name, label) in enumerate(MEMORY.items()):
        places = [i + 0.27 * (k - 1) for i in range(len(memory()))]
        values = [row[name] for row in memory().values()]
        bars = panel.bar(places, values, width=0.25, label=label, color=f"C{k + 2}")
        panel.bar_label(bars, fmt="%.0f", fontsize=8)
    panel.set_xticks(range(len(memory())), list(memory()))
    panel.set_ylabel("MB")
    panel.set_title("memory of a load and a call of one row", fontsize=10)
    panel.grid(axis="y", alpha=0.25)
    panel.legend(fontsize=8, frameon=False)


def main() -> None:
    """Writes both pictures."""
    speed, (left, right) = _panels()
    title = "layers of torch.nn: time of each baseline over widepack's"
    _draw_ratios(left, over_members(), "members (N)", title, BASELINES)
    title = f"networks, N={MEMBERS}: time of the eager loop over widepack's"
    _draw_ratios(right, over_batch(), "batch", title, {})
    fleets, (left, right) = _panels()
    title = "calls: time of whole weights over the fleet's"
    _draw_ratios(left, over_rows(), "rows a member", title, {})
    _draw_memory(right)
    for figure, out in ((speed, SPEED), (fleets, FLEETS)):
        figure.savefig(out, metadata={"Date": None, "Creator": "scripts/docs/plots.py"})


if __name__ == "__main__":
    main()
