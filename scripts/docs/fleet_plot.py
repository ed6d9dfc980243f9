"""Draws docs/images/fleets.svg from bench/results/fleets-cpu.json: the speed of calls, and memory.

python scripts/docs/fleet_plot.py      # needs matplotlib: pip install 'widepack[docs]'
"""

from __future__ import annotations

from typing import Any

from plots import frame_ratios, panels, save

from results import ROOT, read

OUT = ROOT / "docs" / "images" / "fleets.svg"
RATIOS = {"ratio": "", "ratio_least": ', memory="least"'}
MEMORY = {"merged": "whole weights", "fleet": "fleet", "fleet_least": 'fleet, memory="least"'}


def title_of(row: dict[str, Any]) -> str:
    """Returns the name of a fleet."""
    layers = row["layers"]
    return f"N={row['members']}, {layers} layer{'s' if layers > 1 else ''}"


def over_rows() -> dict[str, list[tuple[int, float]]]:
    """Returns for each fleet: (rows a member, time of the artifact of whole weights over the fleet's)."""
    return {
        title_of(row) + words: [(call["rows"], call[key]) for call in row["calls"]]
        for row in read("fleets-cpu")["rows"]
        for key, words in RATIOS.items()
    }


def memory() -> dict[str, dict[str, float]]:
    """Returns for each fleet, and each way to load it: the memory after a call of one row, in MB."""
    return {
        title_of(row): {name: row["memory"][name]["resident"] / 1e6 for name in MEMORY}
        for row in read("fleets-cpu")["rows"]
    }


def draw() -> None:
    """Writes the picture."""
    figure, (speed, size) = panels(2)
    ticks: set[int] = set()
    for name, points in over_rows().items():
        xs, ys = zip(*points, strict=True)
        least = name.endswith(RATIOS["ratio_least"])
        color = f"C{list(memory()).index(name.removesuffix(RATIOS['ratio_least']))}"
        speed.plot(
            xs, ys, marker="o", markersize=4, label=name, color=color, linestyle="--" if least else "-"
        )
        ticks.update(xs)
    frame_ratios(speed, sorted(ticks), "rows a member", "calls: time of whole weights over the fleet's")
    for k, (name, label) in enumerate(MEMORY.items()):
        places = [i + 0.27 * (k - 1) for i in range(len(memory()))]
        values = [row[name] for row in memory().values()]
        bars = size.bar(places, values, width=0.25, label=label, color=f"C{k + 2}")
        size.bar_label(bars, fmt="%.0f", fontsize=8)
    size.set_xticks(range(len(memory())), list(memory()))
    size.set_ylabel("MB")
    size.set_title("memory of a load and a call of one row", fontsize=10)
    size.grid(axis="y", alpha=0.25)
    size.legend(fontsize=8, frameon=False)
    save(figure, OUT, "scripts/docs/fleet_plot.py")


if __name__ == "__main__":
    draw()
