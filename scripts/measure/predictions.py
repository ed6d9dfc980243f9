#!/usr/bin/env python3
"""Compares predicted with measured times: the wide program and the loop over the members, on the suite and on
networks of other sizes.

    taskset -c 1 python scripts/measure/predictions.py -o bench/results/predictions-cpu.json

Networks of the kind `known` were used while the predictions were written; those of the kind `drawn` were not.
One thread, backend `eager`, artifacts as they are built. Predictions come from the kernels of the programs
and from rates of this machine, which are measured first, with kernels alone. No network takes part in that.
All forms of a network run interleaved in one process: the plan by rules of thumb, the wide plan, the loop
plan, and the members' modules one after the other (`modules`). `speedup` is the time of the modules over the
time of the plan by rules. `noise` is the ratio of this plan to itself in the same run. `regret` is the time
of the plan that the rules, or the predictions, choose over the time of the fastest plan.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import widepack
from widepack_bench.baselines.members import own_module
from widepack_bench.baselines.table import loop
from widepack_bench.estimate.calibration import rates_here
from widepack_bench.estimate.call_time import loop_seconds, wide_seconds
from widepack_bench.estimate.rates import Rates
from widepack_bench.measure.inputs import make
from widepack_bench.measure.processors import quiet
from widepack_bench.measure.programs import entry_of
from widepack_bench.measure.race import AGAIN, OURS, race
from widepack_bench.models.factory import MODELS, factory_of
from widepack_bench.models.weights import write_checkpoints
from widepack_bench.report.environment import environment
from widepack_bench.suite.rows import ROWS

PLANS = ("auto", "wide", "loop")
FAMILIES = ("mlp", "deep", "tabular", "vit", "resblock", "conv-net", "cnn1d", "gru", "ft")
LARGE = ("vit", "resblock", "conv-net", "cnn1d", "gru")


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
    factory, options, spec = {
        "mlp": (
            "mlp:mlp",
            {"inputs": inputs, "width": 4 * width, "outputs": width},
            f"input=float32[B,{inputs}]",
        ),
        "deep": (
            "mlp:deep",
            {"inputs": inputs, "width": width, "depth": draw.choice((2, 4, 10))},
            rows,
        ),
        "tabular": (
            "mlp:tabular",
            {"inputs": inputs, "width": width, "depth": 2},
            f"input=float32[B,{inputs}]",
        ),
        "vit": (
            "transformer:vit",
            {
                "image": 24,
                "patch": draw.choice((4, 8)),
                "dim": draw.choice((48, 128)),
                "depth": 2,
                "heads": 4,
                "classes": 5,
            },
            "x=float32[B,3,24,24]",
        ),
        "resblock": (
            "resnet:block",
            {"channels": inputs},
            f"x=float32[B,{inputs},{2 * draw.choice((3, 7, 14))},14]",
        ),
        "conv-net": ("conv:small", {"width": draw.choice((8, 24))}, "input=float32[B,3,24,24]"),
        "cnn1d": (
            "conv:signal",
            {"width": draw.choice((16, 48))},
            f"input=float32[B,8,{draw.choice((48, 96))}]",
        ),
        "gru": ("recurrent:gru", {}, f"x=float32[B,{draw.choice((6, 20))},64]"),
        "ft": (
            "transformer:ft",
            {"features": 8, "dim": draw.choice((16, 48)), "depth": 2, "heads": 4},
            "x=float32[B,8]",
        ),
    }[family]
    if family in LARGE:
        members, batch = min(members, 10), min(batch, 12)
    return Case(family, factory, options, (spec,), members, batch, "drawn")


def cases() -> list[Case]:
    """Returns the rows of the suite in sizes for a CPU, 30 other configurations, and 30 that are drawn."""
    found = [
        Case(
            r.name,
            r.factory,
            r.form("cpu").options,
            r.form("cpu").inputs,
            r.members,
            r.batch,
            "suite",
            r.shared,
        )
        for r in ROWS
    ]

    def other(
        name: str, factory: str, options: Mapping[str, Any], inputs: str, members: int, batch: int
    ) -> None:
        found.append(Case(name, factory, options, (inputs,), members, batch, "known"))

    for width in (64, 192, 384, 768):
        for members, batch in ((8, 1), (8, 32), (32, 1), (32, 32)):
            sizes = {"inputs": width, "width": 2 * width, "outputs": width}
            other(f"mlp-{width}", "mlp:mlp", sizes, f"input=float32[B,{width}]", members, batch)
    for members, batch in ((4, 2), (24, 2), (24, 16)):
        sizes = {"inputs": 40, "width": 160, "depth": 5}
        other("deep-160", "mlp:deep", sizes, "input=float32[B,40]", members, batch)
    for members, batch in ((12, 4), (40, 1)):
        sizes = {"inputs": 30, "width": 256, "depth": 3}
        other("tabular", "mlp:tabular", sizes, "input=float32[B,30]", members, batch)
    vit = {"image": 32, "patch": 8, "dim": 64, "depth": 2, "heads": 2, "classes": 10}
    for members, batch in ((6, 1), (16, 4)):
        other("vit-64", "transformer:vit", vit, "x=float32[B,3,32,32]", members, batch)
    for channels, members, batch in ((16, 12, 2), (32, 6, 16)):
        inputs = f"x=float32[B,{channels},16,16]"
        other(f"resblock-{channels}", "resnet:block", {"channels": channels}, inputs, members, batch)
    other("conv-net-16", "conv:small", {"width": 16}, "input=float32[B,3,32,32]", 12, 2)
    other("cnn1d-64", "conv:signal", {"width": 64}, "input=float32[B,8,64]", 12, 4)
    other("lstm-steps-24", "recurrent:lstm", {}, "x=float32[B,24,64]", 8, 2)
    other("gru-steps-8", "recurrent:gru", {}, "x=float32[B,8,64]", 12, 16)
    other(
        "ft-64",
        "transformer:ft",
        {"features": 12, "dim": 64, "depth": 2, "heads": 4},
        "x=float32[B,12]",
        10,
        8,
    )
    return [*found, *drawn()]


def built(case: Case, folder: str) -> tuple[str, list[str]]:
    """Builds a case with random checkpoints and plans by rules of thumb. Returns the artifact and the
    checkpoints.
    """
    paths = write_checkpoints(case.member, case.members, folder, case.shared)
    artifact = f"{folder}/case.wide"
    widepack.build(
        paths,
        artifact,
        model=f"{MODELS}.{case.factory}",
        model_args=dict(case.options),
        inputs=list(case.inputs),
        pt2=False,
        race=False,
        targets=("cpu",),
    )
    return artifact, paths


def measured(case: Case, rates: Rates, seconds: float) -> dict[str, Any]:
    """Builds a case, predicts it and times it."""
    with tempfile.TemporaryDirectory() as folder:
        artifact, paths = built(case, folder)
        entries = {
            plan: entry_of(
                widepack.load(artifact, backend="eager", strategies=None if plan == "auto" else plan)
            )
            for plan in PLANS
        }
        auto = entries["auto"]
        args, kwargs, sizes = make(auto.entry, case.batch)
        states = [torch.load(p, weights_only=True) for p in paths]
        modules: list[nn.Module] = [
            own_module(lambda _: case.member(), s, str(i)) for i, s in enumerate(states)
        ]
        source = auto.programs.source
        predicted = {
            plan: wide_seconds(entry.programs.for_sizes("shared", sizes).program, sizes, rates)
            for plan, entry in entries.items()
        }
        members = [source.member_program(i) for i in range(case.members)]
        count = sum(1 for _ in modules[0].modules())
        predicted["modules"] = loop_seconds(members, sizes, rates, modules=count)
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
    times = {"auto": found.median_ms(OURS), "modules": found.median_ms("modules")}
    times |= {plan: found.median_ms(plan) for plan in PLANS[1:]}
    plans = {plan: found.ratio(plan).value for plan in PLANS[1:]} | {"auto": 1.0}
    chosen = min(PLANS[1:], key=lambda plan: predicted[plan])
    return {
        "name": case.name,
        "members": case.members,
        "batch": case.batch,
        "kind": case.kind,
        "ms": times,
        "predicted_ms": {k: 1e3 * s for k, s in predicted.items()},
        "speedup": found.ratio("modules").to_json(),
        "predicted_speedup": predicted["modules"] / predicted["auto"],
        "noise": found.ratio(AGAIN).to_json(),
        "regret_rules": 1.0 / min(plans.values()),
        "regret_predicted": plans[chosen] / min(plans.values()),
    }


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns how well speed-ups are ranked and hit, and what the choice of a plan costs."""
    pairs = [(r["speedup"]["value"], r["predicted_speedup"]) for r in rows]
    errors = [abs(math.log(p / m)) for m, p in pairs]
    noise = [abs(math.log(r["noise"]["value"])) for r in rows]
    absolute = [abs(math.log(r["predicted_ms"][k] / r["ms"][k])) for r in rows for k in ("auto", "modules")]
    return {
        "configurations": len(rows),
        "spearman": _spearman([m for m, _ in pairs], [p for _, p in pairs]),
        "geometric_error": _geometric(errors),
        "largest_error": math.exp(max(errors)),
        "within_1.5": sum(e <= math.log(1.5) for e in errors),
        "noise_geometric_error": _geometric(noise),
        "time_geometric_error": _geometric(absolute),
        "regret_rules": _geometric([math.log(r["regret_rules"]) for r in rows]),
        "regret_predicted": _geometric([math.log(r["regret_predicted"]) for r in rows]),
        "largest_regret_rules": max(r["regret_rules"] for r in rows),
        "largest_regret_predicted": max(r["regret_predicted"] for r in rows),
    }


def _geometric(logarithms: Sequence[float]) -> float:
    return math.exp(statistics.fmean(logarithms))


def _spearman(a: Sequence[float], b: Sequence[float]) -> float:
    def ranks(values: Sequence[float]) -> list[int]:
        order = sorted(range(len(values)), key=lambda i: values[i])
        return [order.index(i) for i in range(len(values))]

    return statistics.correlation(ranks(a), ranks(b))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--out", type=Path, default=Path("bench/results/predictions-cpu.json"))
    parser.add_argument("--seconds", type=float, default=1.5, help="of each race")
    parser.add_argument("--only", default="", help="names of cases, separated by commas")
    options = parser.parse_args()
    only = set(options.only.split(",")) - {""}
    rows: list[dict[str, Any]] = []
    with quiet(1):
        rates = rates_here(1)
        for case in cases():
            if only and case.name not in only:
                continue
            rows.append(measured(case, rates, options.seconds))
            row = rows[-1]
            print(
                f"{case.name:15s} N={case.members:<3d} B={case.batch:<3d} speed-up "
                f"{row['speedup']['value']:6.2f} predicted {row['predicted_speedup']:6.2f} "
                f"regret {row['regret_rules']:.2f} {row['regret_predicted']:.2f}",
                flush=True,
            )
    document: dict[str, Any] = {"environment": environment("cpu", 1)}
    if not only:
        document["summary"] = {
            "all": summary(rows),
            **{kind: summary([r for r in rows if r["kind"] == kind]) for kind in ("suite", "known", "drawn")},
        }
        print(json.dumps(document["summary"], indent=1))
    document["rows"] = rows
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
