"""The regret of a measured plan: its time against that of the best candidate, in a fresh process. `python -m widepack_bench.again` is what the process runs."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from widepack.errors import WidepackError


def regret(artifact: str, batch: int, backends: Sequence[str], budget_s: float, threads: int, pin: bool) -> dict[str, Any]:
    """The plan of an artifact for a batch beside every candidate on these backends.

    The best candidate is chosen on the odd rounds and the regret measured on the even ones, so that luck in the choice is not counted twice. Returns: the regret, 1
    where nothing is faster; who is best; milliseconds of each. Raises: what `measured_again` does.
    """
    from widepack.tuner import measured_again

    from .noise import quiet

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


def main() -> None:
    """One line of JSON on standard output, an error as one line on standard error."""
    written, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no result
    try:
        found = regret(**json.loads(sys.argv[1]))
    except WidepackError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        sys.exit(1)
    print(json.dumps(found), file=written)


if __name__ == "__main__":
    main()
