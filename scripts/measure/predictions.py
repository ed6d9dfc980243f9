"""Compares predicted with measured times: the wide program and the loop over the members, on the suite and on
networks of other sizes.

    taskset -c 1 python scripts/measure/predictions.py

Networks of the kind `known` were used while the predictions were written; those of the kind `drawn` were not.
One thread, backend `eager`, artifacts as they are built. Predictions come from the kernels of the programs
and from kernel times of this machine, which are measured first, with kernels alone. No network takes part in
that. All forms of a network run interleaved in one process: the plan of a build (`auto`), the wide plan, the
loop plan, and the members' modules one after the other (`modules`). `speedup` is the time of the modules over
the time of the build's plan. `noise` is the ratio of this plan to itself in the same run. `regret` is the
time of the build's plan over the time of the fastest plan.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from runner import built, parser, run
from torch import nn

import widepack
from widepack.evaluation.ranks import rank_correlation
from widepack.kernel_times.profile import Profile
from widepack.kernel_times.program import loop_seconds, wide_seconds
from widepack_bench.advice.machine_times import times_here
from widepack_bench.baselines.table import loop
from widepack_bench.measure.inputs import make
from widepack_bench.measure.loading import entry_of
from widepack_bench.measure.processors import quiet
from widepack_bench.measure.race import AGAIN, OURS, race
from widepack_bench.models.factory import MODELS, factory_of
from widepack_bench.suite.rows import ROWS

PLANS = ("auto", "wide", "loop")
FAMILIES = ("mlp", "deep", "tabular", "vit", "resblock", "conv-net", "cnn1d", "gru", "ft")
LARGE = ("vit", "resblock", "conv-net", "cnn1d", "gru")
VIT = {"image": 32, "patch": 8, "dim": 64, "depth": 2, "heads": 2, "classes": 10}
FT = {"features": 12, "dim": 64, "depth": 2, "heads": 4}
Sizes = Sequence[tuple[int, int]]
KNOWN: Sequence[tuple[str, str, Mapping[str, Any], str, Sizes]] = (
    *((f"mlp-{w}", "mlp:mlp", {"inputs": w, "width": 2 * w, "outputs": w}, f"input=float32[B,{w}]",
       ((8, 1), (8, 32), (32, 1), (32, 32))) for w in (64, 192, 384, 768)),
    ("deep-160", "mlp:deep", {"inputs": 40, "width": 160, "depth": 5}, "input=float32[B,40]",
     ((4, 2), (24, 2), (24, 16))),
    ("tabular", "mlp:tabular", {"inputs": 30, "width": 256, "depth": 3}, "input=float32[B,30]",
     ((12, 4), (40, 1))),
    ("vit-64", "transformer:vit", VIT, "x=float32[B,3,32,32]", ((6, 1), (16, 4))),
    ("resblock-16", "resnet:block", {"channels": 16}, "x=float32[B,16,16,16]", ((12, 2),)),
    ("resblock-32", "resnet:block", {"channels": 32}, "x=float32[B,32,16,16]", ((6, 16),)),
    ("conv-net-16", "conv:small", {"width": 16}, "input=float32[B,3,32,32]", ((12, 2),)),
    ("cnn1d-64", "conv:signal", {"width": 64}, "input=float32[B,8,64]", ((12, 4),)),
    ("lstm-steps-24", "recurrent:lstm", {}, "x=float32[B,24,64]", ((8, 2),)),
    ("gru-steps-8", "recurrent:gru", {}, "x=float32[B,8,64]", ((12, 16),)),
    ("ft-64", "transformer:ft", FT, "x=float32[B,12]", ((10, 8),)),
)  # fmt: skip
"""Name, factory, options and input of other networks, and numbers of members with batches."""


@dataclass(frozen=True)
class Case:
    """A network, the number of members, and the batch. kind: `suite`, `known` or `drawn`."""

    name: str
    factory: str
    options: Mapping[str, Any]
    inputs: tuple[str, ...]
    members: int
    batch: int
    kind: str
    shared: Callable[[str], bool] = lambda name: False

    def member(self) -> nn.Module:
        """Returns a fresh member."""
        return factory_of(f"{MODELS}.{self.factory}")(**self.options)


def drawn(count: int = 30, seed: int = 2026) -> list[Case]:
    """Draws different configurations. No part of the predictions was chosen with their times in view."""
    draw = random.Random(seed)
    found: dict[str, Case] = {}
    while len(found) < count:
        case = _drawn(draw, FAMILIES[len(found) % len(FAMILIES)])
        found.setdefault(str(case), case)
    return list(found.values())


def _drawn(draw: random.Random, family: str) -> Case:
    members, batch = draw.choice((3, 5, 10, 20, 48)), draw.choice((1, 2, 6, 12, 24))
    width, inputs = draw.choice((32, 80, 144, 320)), draw.choice((20, 50))
    rows = f"input=float32[B,{inputs}]"
    mlp, deep = {"inputs": inputs, "width": 4 * width, "outputs": width}, {"inputs": inputs, "width": width}
    vit: dict[str, Any] = {"image": 24, "depth": 2, "heads": 4, "classes": 5}
    # The order of the draws is part of the cases: every family draws for all.
    deep |= {"depth": draw.choice((2, 4, 10))}
    vit |= {"patch": draw.choice((4, 8)), "dim": draw.choice((48, 128))}
    image = f"x=float32[B,{inputs},{2 * draw.choice((3, 7, 14))},14]"
    small = {"width": draw.choice((8, 24))}
    signal, steps = {"width": draw.choice((16, 48))}, f"input=float32[B,8,{draw.choice((48, 96))}]"
    sequence = f"x=float32[B,{draw.choice((6, 20))},64]"
    factory, options, spec = {
        "mlp": ("mlp:mlp", mlp, rows),
        "deep": ("mlp:deep", deep, rows),
        "tabular": ("mlp:tabular", {**deep, "depth": 2}, rows),
        "vit": ("transformer:vit", vit, "x=float32[B,3,24,24]"),
        "resblock": ("resnet:block", {"channels": inputs}, image),
        "conv-net": ("conv:small", small, "input=float32[B,3,24,24]"),
        "cnn1d": ("conv:signal", signal, steps),
        "gru": ("recurrent:gru", {}, sequence),
        "ft": ("transformer:ft", {**FT, "features": 8, "dim": draw.choice((16, 48))}, "x=float32[B,8]"),
    }[family]
    if family in LARGE:
        members, batch = min(members, 10), min(batch, 12)
    return Case(family, factory, options, (spec,), members, batch, "drawn")


def cases() -> list[Case]:
    """Returns the rows of the suite in sizes for a CPU, 30 other configurations, and 30 that are drawn."""
    suite = [
        Case(r.name, r.factory, f.options, f.inputs, r.members, r.batch, "suite", r.shared)
        for r in ROWS
        for f in (r.form("cpu"),)
    ]
    known = [
        Case(name, factory, options, (spec,), members, batch, "known")
        for name, factory, options, spec, sizes in KNOWN
        for members, batch in sizes
    ]
    return [*suite, *known, *drawn()]


def measured(case: Case, times: Profile, seconds: float) -> dict[str, Any]:
    """Builds a case, predicts it and times it."""
    with tempfile.TemporaryDirectory() as folder:
        modules, artifact = built(folder, case.member, case.members, case.inputs, shared=case.shared)
        entries = {
            plan: entry_of(widepack.load(artifact, backend="eager", strategies=strategies))
            for plan, strategies in (("auto", None), ("wide", "wide"), ("loop", "loop"))
        }
        auto = entries["auto"]
        args, kwargs, sizes = make(auto.entry, case.batch)
        predicted = {
            plan: wide_seconds(entry.programs.for_sizes("shared", sizes).program, sizes, times)
            for plan, entry in entries.items()
        }
        members = [auto.programs.source.member_program(i) for i in range(case.members)]
        count = sum(1 for _ in modules[0].modules())
        predicted["modules"] = loop_seconds(members, sizes, times, modules=count)
        calls = {plan: partial(entry, *args, **kwargs) for plan, entry in entries.items()}
        with torch.inference_mode():
            found = race(
                calls["auto"],
                {"modules": partial(loop(modules, False), *args, **kwargs)},
                others={plan: calls[plan] for plan in PLANS[1:]},
                budget_s=seconds,
                min_rounds=12,
                limit_s=3 * seconds,
            )
    plans = [1.0, *(found.ratio(plan).value for plan in PLANS[1:])]
    names = {"auto": OURS, "modules": "modules", "wide": "wide", "loop": "loop"}
    return {
        "name": case.name,
        "members": case.members,
        "batch": case.batch,
        "kind": case.kind,
        "ms": {key: found.median_ms(name) for key, name in names.items()},
        "predicted_ms": {k: 1e3 * s for k, s in predicted.items()},
        "speedup": found.ratio("modules").to_json(),
        "predicted_speedup": predicted["modules"] / predicted["auto"],
        "noise": found.ratio(AGAIN).to_json(),
        "regret": 1.0 / min(plans),
    }


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns how well speed-ups are ranked and hit, and what the choice of a plan costs."""
    found, predicted = [r["speedup"]["value"] for r in rows], [r["predicted_speedup"] for r in rows]
    errors = [abs(math.log(p / m)) for m, p in zip(found, predicted)]
    noise = [abs(math.log(r["noise"]["value"])) for r in rows]
    absolute = [abs(math.log(r["predicted_ms"][k] / r["ms"][k])) for r in rows for k in ("auto", "modules")]
    regrets = [r["regret"] for r in rows]
    return {
        "configurations": len(rows),
        "spearman": rank_correlation(torch.tensor(found), torch.tensor(predicted)),
        "geometric_error": geometric(errors),
        "largest_error": math.exp(max(errors)),
        "within_1.5": sum(e <= math.log(1.5) for e in errors),
        "noise_geometric_error": geometric(noise),
        "time_geometric_error": geometric(absolute),
        "regret": geometric([math.log(r) for r in regrets]),
        "largest_regret": max(regrets),
    }


def geometric(logarithms: Sequence[float]) -> float:
    """Returns the geometric mean of numbers of which these are the logarithms."""
    return math.exp(statistics.fmean(logarithms))


def summaries(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the summary of all rows, and of each kind."""
    kinds = {kind: [r for r in rows if r["kind"] == kind] for kind in ("suite", "known", "drawn")}
    return {"all": summary(rows), **{kind: summary(of) for kind, of in kinds.items() if of}}


if __name__ == "__main__":
    given = parser(__doc__, "predictions-cpu.json", seconds=1.5).parse_args()
    with quiet(1):
        times = times_here(1)
        measures = {
            f"{k}: {case.name}, {case.members}, {case.batch}": partial(measured, case, times, given.seconds)
            for k, case in enumerate(cases())
        }
        sys.exit(run(given, measures, summary=summaries))
