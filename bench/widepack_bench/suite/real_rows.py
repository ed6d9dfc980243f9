"""Measures one network of the suite `real` with one number of members: builds it, and compares each batch.

An artifact is measured as `widepack build` leaves it (default), and after `widepack tune` (tuned). Both take
part in one race with the baselines.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import widepack
from widepack.spec.dtypes import DTYPES
from widepack.system.timing import once

from ..baselines.members import call_inputs
from ..baselines.table import BASELINES
from ..measure.processors import quiet
from ..models.factory import factory_of
from ..models.weights import write_checkpoints
from .compare import compare
from .real_networks import RealNetwork, chosen_networks
from .real_table import TUNED
from .row import in_dtype

ARTIFACT = "built.wide"
LEAST_ROUNDS = 14  # half of them measure the ratio; an interval needs six


@dataclass(frozen=True, slots=True)
class RealOptions:
    """Options of the suite. All are JSON values, because a network runs in its own process.

    baselines: empty for all. tune: also measure the tuned artifact. budget_s: seconds of measuring for each
    row. call_limit_s: a batch for which the loop takes longer is not measured. compile_limit_s: seconds that
    one baseline may take to compile. dtype: of the weights and the inputs; empty for float32.
    """

    baselines: Sequence[str] = ()
    tune: bool = False
    budget_s: float = 10.0
    call_limit_s: float = 3.0
    compile_limit_s: float = 120.0
    threads: int = 1
    pin: bool = False
    dtype: str = ""


def run_network(
    name: str, members: int, calls: Sequence[tuple[int, str]], **options: Any
) -> Iterator[dict[str, Any]]:
    """Yields the results of a network as JSON values, one for each batch and pattern.

    calls: the batches and patterns. options: fields of `RealOptions`.
    """
    given = RealOptions(**options)
    (network,) = chosen_networks([name])
    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory(prefix="widepack-suite-") as folder, quiet(given.threads, given.pin):
        modules, artifact, build = _built(network, members, folder, given.dtype)
        ens = widepack.load(artifact)
        for batch, pattern in calls:
            row = {"batch": batch, "pattern": pattern, **build}
            seconds = _loop_seconds(ens, modules, batch)
            if seconds > given.call_limit_s:
                yield {**row, "skipped": f"a call of the loop takes {seconds:.1f} s"}
                continue
            measured = _measured(ens, modules, _Call(batch, pattern, seconds), given, folder)
            yield {**row, **measured}


@dataclass(frozen=True, slots=True)
class _Call:
    """What is measured. loop_s: about how many seconds a call of the loop takes."""

    batch: int
    pattern: str
    loop_s: float


def _built(
    network: RealNetwork, members: int, folder: str, dtype: str = ""
) -> tuple[list[nn.Module], str, dict[str, Any]]:
    """Writes random checkpoints and builds them. Returns the members, the artifact and what was measured."""
    make = partial(factory_of(network.model), **network.options)
    paths = write_checkpoints(make, members, folder)
    modules = []
    for path in paths:
        with torch.device("meta"):
            member = make()
        member.load_state_dict(torch.load(path, mmap=True, weights_only=True), assign=True)
        modules.append(member.to(DTYPES[dtype or "float32"]).eval())
    begin = time.perf_counter()
    artifact = f"{folder}/{ARTIFACT}"
    report = widepack.build(
        paths,
        artifact,
        model=network.model,
        model_args=dict(network.options),
        inputs=in_dtype(network.inputs, dtype),
        dtype=dtype or None,
        targets=("cpu",),
        pt2=False,
    )
    raced = report.raced.get("rows", ()) if report.raced else ()
    build = {
        "build_s": time.perf_counter() - begin,
        "weights_bytes": sum(os.path.getsize(f) for f in Path(artifact).glob("weights-*")),
        "parameters": sum(p.numel() for p in modules[0].parameters()),
        "raced": {f"{r['pattern']}, batch {r['batch']}": r["chosen"] for r in raced},
    }
    return modules, artifact, build


def _loop_seconds(ens: widepack.WideModel, modules: Sequence[nn.Module], batch: int) -> float:
    """Returns the seconds of a call of the first member times the number of members."""
    args, kwargs, _ = call_inputs(ens.entry("forward").entry, None, batch, 0, "cpu")
    with torch.inference_mode():
        modules[0](*args, **kwargs)
        return len(modules) * once(lambda: modules[0](*args, **kwargs))


def _measured(
    ens: widepack.WideModel, modules: Sequence[nn.Module], call: _Call, options: RealOptions, folder: str
) -> dict[str, Any]:
    """Times the artifact, and its tuned copy if requested, against the baselines."""
    others: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    if options.tune:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            copy = f"{place}/tuned.wide"
            extra = _tuned(f"{folder}/{ARTIFACT}", copy, call, options)
            others[TUNED] = widepack.load(copy)  # mapped files stay readable without their names
    baselines = options.baselines or tuple(BASELINES)
    contestants = 2 + len(others) + len(baselines)
    report = compare(
        ens,
        modules,
        (call.batch,),
        baselines=baselines,
        others=others,
        budget_s=max(options.budget_s, LEAST_ROUNDS * contestants * call.loop_s / 3),
        compile_limit_s=options.compile_limit_s,
        pattern=call.pattern,
        roofline=options.tune,
    )
    document = report.to_json()
    if not document["rows"]:
        return {"error": "; ".join(report.refused.values()), **extra}
    return {**extra, "environment": document["environment"], "result": document["rows"][0]}


def _tuned(artifact: str, copy: str, call: _Call, options: RealOptions) -> dict[str, Any]:
    """Tunes a copy of the artifact. Returns the seconds, and the plan."""
    shutil.copytree(artifact, copy, copy_function=os.link)
    begin = time.perf_counter()
    report = widepack.tune(
        copy, batches=(call.batch,), patterns=(call.pattern,), budget_s=options.budget_s, write=True
    )
    (row,) = report.to_json()["rows"]
    plan = {key: row[key] for key in ("chosen", "backend", "strategies")}
    return {"tune_s": time.perf_counter() - begin, "tuned_plan": plan}
