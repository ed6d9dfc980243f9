"""Measures the regret of a measured plan: its time against the best candidate's, in a process that did not
choose it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any


def regret(
    artifact: str,
    batch: int,
    backends: Sequence[str],
    budget_s: float,
    threads: int,
    pin: bool,
    device: str = "cpu",
) -> dict[str, Any]:
    """Times the plan of an artifact for a batch beside every candidate on these backends.

    The odd rounds choose the best candidate, and the even rounds measure the regret: random errors of the
    choice do not count twice. Returns the regret (1 where no candidate is faster), the best candidate, and
    the milliseconds of each. Raises: whatever `measured_again` raises.
    """
    from widepack.tuning.tune import measured_again

    from ..measure.processors import quiet

    with quiet(threads, pin):
        times = measured_again(artifact, batch, backends=backends, budget_s=budget_s, device=device)
    odd = {name: statistics.median(seconds[::2]) for name, seconds in times.items()}
    best = min(odd, key=lambda name: odd[name])
    ratio = statistics.median(a / b for a, b in zip(times["chosen"][1::2], times[best][1::2]))
    return {
        "regret": max(1.0, ratio),
        "best": best,
        "rounds": len(times["chosen"]),
        "times_ms": {name: 1e3 * statistics.median(seconds) for name, seconds in times.items()},
    }
