"""Times the calls of fleets in turn, on the wall and on the processor."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch

from widepack.system.timing import waited


def race(
    calls: Mapping[str, Callable[[], Any]], seconds: float, device: str = "cpu"
) -> dict[str, dict[str, float]]:
    """Runs the calls in turn. Returns for each the median ms, the CPU ms, and the quartiles.

    device: of the calls. A call on a CUDA device ends when the device has done its work.
    """
    calls = {name: waited(call, torch.device(device)) for name, call in calls.items()}
    for call in calls.values():
        for _ in range(3):
            call()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    rounds = 0
    while rounds < 7 or time.perf_counter() < end:
        order = list(calls)
        order = order[rounds % len(order) :] + order[: rounds % len(order)]
        for name in order:
            wall, cpu = time.perf_counter(), time.process_time()
            calls[name]()
            times[name].append((1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu)))
        rounds += 1
    found = {}
    for name, rows in times.items():
        wall_ms = sorted(w for w, _ in rows)
        found[name] = {
            "ms": median(wall_ms),
            "cpu_ms": median(c for _, c in rows),
            "low_ms": wall_ms[len(wall_ms) // 4],
            "high_ms": wall_ms[3 * len(wall_ms) // 4],
            "rounds": rounds,
        }
    return found
