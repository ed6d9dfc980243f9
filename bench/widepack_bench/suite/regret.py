"""The regret of a measured plan: its time against that of the best candidate, asked of a process that has chosen nothing."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any


def regret(artifact: str, batch: int, backends: Sequence[str], budget_s: float, threads: int, pin: bool) -> dict[str, Any]:
    """The plan of an artifact for a batch beside every candidate on these backends.

    The best candidate is chosen on the odd rounds and the regret measured on the even ones, so that luck in the choice is not counted twice. Returns: the regret, 1
    where nothing is faster; who is best; milliseconds of each. Raises: what `measured_again` does.
    """
    from widepack.tuning.tune import measured_again

    from ..measure.race import quiet

    with quiet(threads, pin):
        times = measured_again(artifact, batch, backends=backends, budget_s=budget_s)
    odd = {name: statistics.median(found[::2]) for name, found in times.items()}
    best = min(odd, key=lambda name: odd[name])
    ratio = statistics.median(a / b for a, b in zip(times["chosen"][1::2], times[best][1::2]))
    return {
        "regret": max(1.0, ratio),
        "best": best,
        "rounds": len(times["chosen"]),
        "times_ms": {name: 1e3 * statistics.median(found) for name, found in times.items()},
    }
