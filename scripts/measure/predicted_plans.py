"""Compares predicted with measured times of several plans of each network of a collection.

    taskset -c 1 python scripts/measure/predicted_plans.py COLLECTION [--sample 60]

COLLECTION is a folder as `scripts/measure/backends.py` takes it. No network of it took part in the
predictions. Three members, one thread, backend `eager`, by the processor's time, interleaved in one process.
Each network has the plan of a load (`auto`), one op for all members (`wide`), a loop over the members
(`loop`), and plans that prefer other strategies, where these change the program.

| value | meaning |
|---|---|
| `spearman` | of predicted and measured times over the plans |
| `best` | the time of the plan that is predicted best, over that of the fastest |
| `error` | the geometric mean of predicted over measured times, or of the inverse |

They stand for kernel times that were measured here (`here`), and for the shipped profile alone (`shipped`).
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from predictions import geometric
from runner import in_turns, parser, run

import widepack
from backends import BATCHES, Collection
from widepack.evaluation.ranks import rank_correlation
from widepack.kernel_times.profile import Profile
from widepack.kernel_times.program import wide_seconds
from widepack.kernel_times.sources import shipped
from widepack_bench.advice.machine_times import times_here
from widepack_bench.measure.inputs import sizes
from widepack_bench.measure.loading import entry_of
from widepack_bench.measure.processors import quiet

PREFERRED = ("packed", "streamed", "bmm", "one_gemm", "grouped")
ROUNDS, LEAST_S = 9, 0.01


def measured(collection: Collection, name: str, times: Mapping[str, Profile]) -> dict[str, Any]:
    """Builds an architecture, predicts the plans of its artifact, and times them."""
    with tempfile.TemporaryDirectory() as folder:
        collection.build(name, collection.members(name), Path(folder), "cpu")
        args, kwargs = collection.zoo.inputs(name, BATCHES[0], 1)
        calls: dict[str, Callable[[], Any]] = {}
        predicted: dict[str, dict[str, float]] = {key: {} for key in times}
        seen = set()
        for plan in ("auto", "wide", "loop", *PREFERRED):
            how = [plan] if plan in PREFERRED else plan
            entry = entry_of(widepack.load(Path(folder) / "e.wide", backend="eager", strategies=how))
            named = sizes(entry.entry, BATCHES[0])
            program = entry.programs.for_sizes("shared", named).program
            if (content := str(program.to_json())) not in seen:
                seen.add(content)
                calls[plan] = partial(entry, *args, **kwargs)
                for key, profile in times.items():
                    predicted[key][plan] = 1e3 * wide_seconds(program, named, profile)
        with torch.inference_mode():
            found = in_turns(list(calls), lambda plan, _: _milliseconds(calls[plan]), ROUNDS)
    ms = {plan: statistics.median(values) for plan, values in found.items()}
    return {"plans": len(ms), "ms": ms, **{key: compared(ms, one) for key, one in predicted.items()}}


def _milliseconds(call: Callable[[], Any]) -> float:
    """Returns the processor's time of a call, over as many as take `LEAST_S`."""
    began, count = time.process_time(), 0
    while (spent := time.process_time() - began) < LEAST_S or not count:
        call()
        count += 1
    return 1e3 * spent / count


def compared(ms: Mapping[str, float], predicted: Mapping[str, float]) -> dict[str, Any]:
    """Returns how well times were predicted. Both are by plan."""
    best = min(predicted, key=predicted.__getitem__)
    errors = [abs(math.log(predicted[plan] / ms[plan])) for plan in ms]
    return {
        "predicted_ms": dict(predicted),
        "spearman": rank_correlation(*(torch.tensor([one[p] for p in ms]) for one in (ms, predicted))),
        "best": ms[best] / min(ms.values()),
        "error": geometric(errors),
    }


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the median correlation, what the best predicted plan costs, and the error of times."""

    def spearman(key: str) -> float | None:
        found = [r[key]["spearman"] for r in rows if r["plans"] > 2 and r[key]["spearman"] is not None]
        return statistics.median(found) if found else None

    return {
        "networks": len(rows),
        "plans": sum(r["plans"] for r in rows),
        **{
            key: {
                "spearman": spearman(key),
                "best": statistics.fmean(r[key]["best"] for r in rows),
                "worst": max(r[key]["best"] for r in rows),
                "error": geometric([math.log(r[key]["error"]) for r in rows]),
            }
            for key in ("here", "shipped")
        },
    }


def main() -> int:
    options: argparse.ArgumentParser = parser(__doc__, "predicted-plans-cpu.json")
    options.add_argument("collection", type=Path)
    options.add_argument("--sample", type=int, default=60)
    given = options.parse_args()
    collection = Collection(given.collection)
    with quiet(1):
        here = times_here(1)
        nearest = [p for p in shipped().values() if p.machine == here.machine] or [*shipped().values()]
        times = {"here": here, "shipped": nearest[0]}
        rows = {n: partial(measured, collection, n, times) for n in collection.drawn(given.sample)}
        return run(given, rows, summary=summary)


if __name__ == "__main__":
    sys.exit(main())
