"""A wide program run op by op with a clock: what each node of the member program costs, with the copies that its strategy makes around it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..runtime.graph_module import Executable, graph_module
from ..system.timing import without_gc

RUNS = 5


class _Clocked(fx.Interpreter):
    """Notes the seconds of every node that computes something, in the program's order."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.seconds: list[float] = []

    def run_node(self, n: fx.Node) -> Any:
        if n.op not in ("call_function", "call_module"):
            return super().run_node(n)
        start = time.perf_counter()
        made = super().run_node(n)
        self.seconds.append(time.perf_counter() - start)
        return made


def cost_of_nodes(run: Executable, device: torch.device, inputs: Sequence[torch.Tensor], budget_s: float = 0.2) -> dict[str, float]:
    """Seconds by node of the member program: medians over runs, of all wide nodes that were made for it. inputs: of a wide call."""
    module = graph_module(run.program, device, run.workers)
    found: list[list[float]] = []
    end = time.perf_counter() + budget_s
    with torch.inference_mode(), without_gc():
        while len(found) < RUNS or time.perf_counter() < end:
            clock = _Clocked(module)
            clock.run(*run.weights, *inputs)
            found.append(clock.seconds)
    seconds: dict[str, float] = {}
    for node, times in zip(run.program.nodes, zip(*found[1:], strict=True), strict=True):  # the first run pays for what later ones find
        name = node.member or node.name
        seconds[name] = seconds.get(name, 0.0) + statistics.median(times)
    return seconds
