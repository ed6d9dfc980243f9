"""Writes predicted times as words, for the reasons of plans."""

from __future__ import annotations

from ..kernel_times.model import TimeModel
from .plan import NodeChoice
from .strategy_times import NodeTimes


def node_choice(times: NodeTimes, model: TimeModel, first: bool = False) -> NodeChoice:
    """Returns the choice of a node, with its predicted time and that of the next best strategy.

    Args:
        times: The times of the node's strategies.
        model: The device.
        first: Whether lowering takes the chosen strategy without a plan.
    """
    own = times.time
    kernels = f"{own.kernels} kernel{'' if own.kernels == 1 else 's'}"
    words = f"about {microseconds(own.seconds)} on {model.place}: {kernels}, bound by {own.bound}"
    others = sorted((t.seconds, name) for name, t in times.times.items() if name != times.chosen)
    if others:
        words += f"; next {others[0][1]}, {microseconds(others[0][0])}"
    return NodeChoice(times.chosen, words, first=first)


def microseconds(seconds: float) -> str:
    """Returns microseconds with two digits that count: `3.2 us`, `140 us`, `1,300 us`."""
    micro = seconds * 1e6
    if micro >= 9.95:
        digits = max(0, len(str(int(micro))) - 2)
        return f"{round(micro, -digits):,.0f} us"
    return f"{micro:.1f} us"
