"""Measures the cost of a call beyond its graph: binding, checks, the choice of the program, and building the
answer.

    taskset -c 1 python scripts/measure/call_overhead.py [--seconds 10]

N=4 members of an MLP 8-8-4 at a batch of 1, one thread, backend `eager`. The bare graph is the flat function
over the bound weights, under inference mode. For each way of calling, it is the graph that this call runs,
with the same tensors. Both sides of every row are interleaved in one process, in blocks of a millisecond and
in changing order. `over_us` is the median over rounds of the difference within a round, with its 95%
interval. `again_us` is the same for the bare graph against itself: the noise of the measurement.

| row | the call |
|---|---|
| `ens(x)` | a tensor by position |
| `ens(x=x)` | the same tensor by keyword |
| `ens.each(xs)` | one input for each member |
| `ens(x, h=each(h))` | mixed: one x for all, one h for each member |
| `structured` | a dict of tensors and a tuple, by keyword; the answer is a dict |
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from runner import built, parser, run
from torch import Tensor, nn

import widepack
from widepack.system.timing import once, without_gc
from widepack_bench.measure.answers import difference, leaves
from widepack_bench.measure.loading import entry_of
from widepack_bench.measure.processors import quiet
from widepack_bench.measure.race import median_interval, order

MEMBERS, GOAL_US, BLOCK_S = 4, 20, 1e-3
Call = Callable[[], Any]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


class Two(nn.Module):
    """An MLP with two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor, h: Tensor) -> Any:
        return self.net(x + h)


class Structured(nn.Module):
    """An MLP that takes a dict and a tuple, and returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, batch: dict[str, Tensor], state: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        y = self.net(batch["x"] + batch["y"])
        return {"logits": y + state[0], "state": state[1] * 2}


def loaded(folder: Path, make: Callable[[], nn.Module], *sample: Any) -> widepack.WideModel:
    """Builds members that are called like `sample`, and loads them."""
    folder.mkdir()
    _, path = built(folder, make, MEMBERS, [], sample=sample)
    return widepack.load(path, backend="eager")


def bare(ens: widepack.WideModel, pattern: str, *values: Tensor) -> Call:
    """Returns the flat function of the pattern's program over its weights. values: tensors of the call."""
    executable = entry_of(ens).programs.for_sizes(pattern, {"B": 1}).executable
    forward, weights = executable.forward, executable.weights
    return lambda: forward(*weights, *values)


def calls(folder: Path) -> dict[str, tuple[Call, Call]]:
    """Returns each way of calling, and its bare graph."""
    x, h, more = torch.randn(1, 8), torch.randn(MEMBERS, 1, 8), torch.randn(1, 4)
    xs = torch.randn(MEMBERS, 1, 8)
    one = loaded(folder / "one", mlp, torch.randn(3, 8))
    two = loaded(folder / "two", Two, torch.randn(3, 8), torch.randn(3, 8))
    given, state = {"x": x, "y": x + 1}, (more, more + 1)
    batch = {"x": torch.randn(3, 8), "y": torch.randn(3, 8)}
    nested = loaded(folder / "structured", Structured, batch, (torch.randn(3, 4), torch.randn(3, 4)))
    return {
        "ens(x)": (lambda: one(x), bare(one, "shared", x)),
        "ens(x=x)": (lambda: one(input=x), bare(one, "shared", x)),
        "ens.each(xs)": (lambda: one.each(xs), bare(one, "each", xs)),
        "ens(x, h=each(h))": (lambda: two(x, h=widepack.each(h)), bare(two, "mixed:se", x, h)),
        "structured": (
            lambda: nested(batch=given, state=state),
            bare(nested, "shared", *given.values(), *state),
        ),
    }


def measured(call: Call, graph: Call, seconds: float) -> dict[str, Any]:
    """Measures a call and its bare graph. The bare graph is measured twice, under two names."""
    answer = leaves(call())
    wrong = difference(answer, [g.expand_as(a) for a, g in zip(answer, leaves(graph()), strict=True)])
    if wrong:
        raise AssertionError(f"the call's answer is not its graph's: {wrong}")
    contestants = [call, graph, graph]
    for _ in range(1000):
        call()
        graph()
    sizes = [max(1, round(BLOCK_S / once(c, 100))) for c in contestants]
    rounds: list[tuple[float, ...]] = []
    with without_gc():
        end = time.perf_counter() + seconds
        while len(rounds) < 24 or time.perf_counter() < end:
            times = [0.0] * 3
            for place in order(len(rounds), 3):
                contestants[place]()
                times[place] = once(contestants[place], sizes[place])
            rounds.append(tuple(1e6 * t for t in times))
    over = median_interval([c - g for c, g, _ in rounds])
    return {
        "call_us": median_interval([c for c, _, _ in rounds]).to_json(),
        "graph_us": median_interval([g for _, g, _ in rounds]).to_json(),
        "over_us": over.to_json(),
        "again_us": median_interval([a - g for _, g, a in rounds]).to_json(),
        "rounds": len(rounds),
        "holds": over.high <= GOAL_US,
    }


if __name__ == "__main__":
    given = parser(__doc__, "call-overhead-cpu.json", seconds=10.0).parse_args()
    with tempfile.TemporaryDirectory() as name, quiet(1, pin=True), torch.inference_mode():
        ways = calls(Path(name)).items()
        sys.exit(run(given, {key: partial(measured, *both, given.seconds) for key, both in ways}))
