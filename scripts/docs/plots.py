"""Draws panels of plots in one style. The same data gives the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def panels(count: int) -> tuple[Any, Any]:
    """Returns a figure of matplotlib with panels side by side, and the panels."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    mpl.rcParams.update(
        {"svg.hashsalt": "widepack", "svg.fonttype": "none", "font.size": 10, "font.family": "sans-serif"}
    )
    figure, found = plt.subplots(1, count, figsize=(5.4 * count, 4.2), layout="constrained")
    return figure, found


def frame_ratios(panel: Any, ticks: Sequence[int], axis: str, title: str) -> None:
    """Draws the axes of a panel of ratios over numbers that double."""
    from matplotlib.ticker import NullLocator, ScalarFormatter

    panel.axhline(1, color="#888", linewidth=0.8)
    panel.set_xscale("log", base=2)
    panel.set_xticks(ticks)
    panel.xaxis.set_major_formatter(ScalarFormatter())
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_xlabel(axis)
    panel.set_ylabel("times as fast")
    panel.set_title(title, fontsize=10)
    panel.set_ylim(bottom=0)
    panel.grid(alpha=0.25)
    panel.legend(fontsize=8, frameon=False)


def save(figure: Any, out: Path, script: str) -> None:
    """Writes a figure. script: the script that drew it."""
    figure.savefig(out, metadata={"Date": None, "Creator": script})
