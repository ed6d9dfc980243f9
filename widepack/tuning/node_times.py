"""Measures the seconds of each node of the member program in a wide program, with the copies that its
strategy makes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..runtime.executable import Executable
from ..runtime.graph_module import graph_module
from ..system.timing import waited, without_gc

RUNS = 5


class _TimedInterpreter(fx.Interpreter):
    """Records the seconds of every node that computes something, in the program's order."""

    def __init__(self, module: fx.GraphModule, device: torch.device) -> None:
        super().__init__(module)
        self.seconds: list[float] = []
        self._device = device

    def run_node(self, n: fx.Node) -> Any:
        if n.op not in ("call_function", "call_module"):
            return super().run_node(n)
        start = time.perf_counter()
        result = waited(lambda: super(_TimedInterpreter, self).run_node(n), self._device)()
        self.seconds.append(time.perf_counter() - start)
        return result


def cost_of_nodes(
    run: Executable, device: torch.device, inputs: Sequence[torch.Tensor], budget_s: float = 0.2
) -> dict[str, float]:
    """Returns the seconds of each node of the member program: the sum over the wide nodes that were made for
    it.

    The seconds are medians over several runs. `inputs` are those of a wide call.
    """
    module = graph_module(run.program, device, run.workers)
    runs: list[list[float]] = []
    end = time.perf_counter() + budget_s
    with torch.inference_mode(), without_gc():
        while len(runs) < RUNS or time.perf_counter() < end:
            interpreter = _TimedInterpreter(module, device)
            interpreter.run(*run.weights, *inputs)
            runs.append(interpreter.seconds)
    seconds: dict[str, float] = {}
    # the first run is slower, because it fills caches
    for node, times in zip(run.program.nodes, zip(*runs[1:], strict=True), strict=True):
        name = node.member or node.name
        seconds[name] = seconds.get(name, 0.0) + statistics.median(times)
    return seconds
