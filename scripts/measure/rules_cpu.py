#!/usr/bin/env python3
"""Measures the data for the rules of thumb of a CPU. The networks of the suite run at several batches, as a
loop and wide, with plain weights and with packed convolutions, and as the rules choose.

    taskset -c 1 python scripts/measure/rules_cpu.py [-o bench/results/rules-cpu.json] [--seconds 3] [--only
    NAME,...]

One thread, backend `eager`, CPU-sized forms of the rows of the suite. All forms of a network at a batch are
interleaved in one process. Before the timing, the script checks that their answers are equal. `ms` is the
median. `over_loop` is the median over rounds of the time of the plain loop over the time of a form (over 1:
faster than the loop). `activations_kib` is the input of the rules: the bytes that an op of all members reads
and writes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

import widepack
from widepack.planning.packed_convs import packable
from widepack.planning.plan import NodeChoice
from widepack.planning.working_set import activations
from widepack.system.timing import race, ratio
from widepack.tuning.candidate_pool import RULES, with_choices
from widepack.tuning.search import Search, SearchOptions
from widepack.tuning.searches import searches_of
from widepack_bench.measure.processors import quiet
from widepack_bench.measure.programs import entry_of
from widepack_bench.models.factory import factory_of
from widepack_bench.models.weights import write_checkpoints
from widepack_bench.report.environment import environment
from widepack_bench.suite.rows import chosen

ROOT = Path(__file__).resolve().parents[2]
BATCHES = {
    "mlp-b32": (8, 32, 64, 128),
    "deep-mlp": (8, 16, 32),
    "ft-transformer": (16, 64),
    "vit": (1, 4, 8),
    "bert": (1, 4, 8),
    "conv-net": (1, 8, 32),
    "resblock": (1, 8, 32),
    "resnet18": (1, 8, 24),
    "resnet50": (1, 4),
    "unet": (1, 4, 16),
    "cnn1d": (1, 16, 64),
}
PACK = NodeChoice("packed", "measured")


def measured(search: Search, batch: int, seconds: float) -> dict[str, Any]:
    """Measures one network at one batch."""
    members = len(search.simple.signatures)
    packs = dict.fromkeys(packable(search.first, search.kinds, members), PACK)
    (wide,), (loop,) = search.whole("wide"), search.whole("loop")
    plans = {"loop": loop, "wide": wide, "by the rules": search.rules()}
    if packs:
        plans |= {"loop, packed": with_choices(loop, packs), "wide, packed": with_choices(wide, packs)}
    candidates = {
        name: search.candidate(RULES if name == "by the rules" else name, plan)
        for name, plan in plans.items()
    }
    correct = {
        name: c for name, c in candidates.items() if c is not None and search.is_right(search.bound(c))
    }
    times = race({name: search.call(c) for name, c in correct.items()}, seconds)
    grows = activations(search.first, search.kinds, members, search.example, search.letter)
    for c in correct.values():
        c.bound = None
    return {
        "members": members,
        "batch": batch,
        "activations_kib": round((grows.fixed + grows.slope * batch) / 1024, 1),
        "rules": dict(search.rules().strategies()),
        "ms": {name: round(1e3 * sorted(t)[len(t) // 2], 4) for name, t in times.items()},
        "over_loop": {name: round(ratio(times, "loop", name), 3) for name in times},
        "dropped": search.dropped,
    }


def network(name: str, seconds: float) -> list[dict[str, Any]]:
    (row,) = chosen([name])
    form = row.form("cpu")
    make = partial(factory_of(row.model), **form.options)
    with tempfile.TemporaryDirectory() as folder:
        paths = write_checkpoints(make, row.members, folder, row.shared)
        out = f"{folder}/{name}.wide"
        widepack.build(
            paths,
            out,
            model=row.model,
            model_args=dict(form.options),
            inputs=list(form.inputs),
            targets=("cpu",),
            pt2=False,
        )
        searches, refused = searches_of(
            Search,
            entry_of(widepack.load(out, backend="eager", warmup=False)),
            "shared",
            BATCHES[name],
            SearchOptions(seconds),
        )
        if refused:
            raise SystemExit(f"{name}: {refused}")
        return [measured(search, batch, seconds) for batch, search in searches.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-o", "--out", type=Path, default=ROOT / "bench/results/rules-cpu.json")
    parser.add_argument(
        "--seconds", type=float, default=3, help="seconds of measurement for each network and batch"
    )
    parser.add_argument("--only", default=",".join(BATCHES), help="names of networks, separated by commas")
    given = parser.parse_args()
    rows: dict[str, Any] = {}
    with quiet(1, pin=True), torch.inference_mode():
        for name in given.only.split(","):
            rows[name] = network(name, given.seconds)
            for row in rows[name]:
                print(
                    f"{name} N={row['members']} B={row['batch']}: {row['activations_kib']} KiB, "
                    f"{row['ms']}, rules {row['rules']}",
                    flush=True,
                )
    record = {"what": __doc__, "environment": environment("cpu", 1), "rows": rows}
    given.out.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
