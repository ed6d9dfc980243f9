"""Measures rows of the suites: writes random checkpoints, builds the artifact, tunes it, and compares it.

A row of the suite `real` has the artifact as `widepack build` leaves it (default), and after `widepack tune`
(tuned). Both take part in one race with the baselines. A reference network is tuned in place.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from .bench import bench
from .compare import compare
from .real_networks import chosen_networks
from .rows import Form, chosen
from .table import TUNED

BY_HAND = "trunk shared by hand"
LEAST_ROUNDS = 14  # half of them measure the ratio; an interval needs six


@dataclass(frozen=True, slots=True)
class SuiteOptions:
    """Options of a row. All are JSON values, because a row runs in its own process.

    baselines: empty for all. tune: also measure a tuned artifact. budget_s: seconds of measuring.
    call_limit_s: a batch of the suite `real` for which the loop takes longer is not measured.
    compile_limit_s: seconds that one baseline may take to compile. dtype: of the weights and the inputs;
    empty for float32. The others are as in `bench`.
    """

    baselines: Sequence[str] = ()
    backends: Sequence[str] = ("auto",)
    budget_s: float = 10.0
    call_limit_s: float = 3.0
    compile_limit_s: float = 120.0
    threads: int = 1
    pin: bool = False
    alone: bool = False
    tune: bool = False
    device: str = "cpu"
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class Built:
    """A network that was built. facts: what was measured of the build, as JSON values."""

    paths: Sequence[str]
    artifact: str
    facts: Mapping[str, Any]
    make: Callable[[], nn.Module]
    dtype: torch.dtype

    @classmethod
    def of(
        cls,
        model: str,
        form: Form,
        members: int,
        folder: str,
        options: SuiteOptions,
        shared: Callable[[str], bool] = lambda name: False,
    ) -> Built:
        """Writes random checkpoints into a folder, and builds them."""
        make = partial(factory_of(model), **form.options)
        paths = write_checkpoints(make, members, folder, shared)
        begin = time.perf_counter()
        artifact = f"{folder}/built.wide"
        # On a GPU no contestant computes on the CPU: the build may use all of it.
        torch.set_num_threads(options.threads if options.device == "cpu" else os.cpu_count() or 1)
        report = widepack.build(
            paths,
            artifact,
            model=model,
            model_args=dict(form.options),
            inputs=[s.replace("=float32[", f"={options.dtype or 'float32'}[") for s in form.inputs],
            dtype=options.dtype or None,
            targets=(torch.device(options.device).type,),
            pt2=False,
        )
        measured = report.measured.get("rows", ()) if report.measured else ()
        facts = {
            "build_s": time.perf_counter() - begin,
            "weights_bytes": sum(os.path.getsize(f) for f in Path(artifact).glob("weights-*")),
            "raced": {f"{r['pattern']}, batch {r['batch']}": r["chosen"] for r in measured},
        }
        return cls(paths, artifact, facts, make, DTYPES[options.dtype or "float32"])

    def modules(self) -> list[nn.Module]:
        """Returns the members; weights are mapped from the checkpoints."""
        found = []
        for path in self.paths:
            with torch.device("meta"):
                member = self.make()
            member.load_state_dict(torch.load(path, mmap=True, weights_only=True), assign=True)
            found.append(member.to(self.dtype).eval())
        return found


def tuned(artifact: str, batch: int, pattern: str, options: SuiteOptions) -> dict[str, Any]:
    """Tunes an artifact in place. Returns the seconds, and the plan."""
    begin = time.perf_counter()
    report = widepack.tune(
        artifact,
        batches=(batch,),
        patterns=(pattern,),
        budget_s=options.budget_s,
        device=options.device,
        write=True,
    )
    (row,) = report.to_json()["rows"]
    plan = {key: row[key] for key in ("chosen", "backend", "strategies")}
    return {"tune_s": time.perf_counter() - begin, "tuned_plan": plan}


def run_reference(name: str, size: str, rows: Sequence[Any], **options: Any) -> Iterator[dict[str, Any]]:
    """Yields the result of a row of the suite as JSON values.

    size: `cpu` or `full`. rows: one. options: fields of `SuiteOptions`.
    """
    given = SuiteOptions(**options)
    (network,) = chosen([name])
    (row,) = rows
    form = network.form(size)
    with tempfile.TemporaryDirectory(prefix="widepack-suite-") as folder:
        built = Built.of(network.model, form, row["members"], folder, given, network.shared)
        facts = dict(built.facts)
        if given.tune:
            with quiet(given.threads, given.pin):
                facts |= tuned(built.artifact, network.batch, "shared", given)
        report = bench(
            built.artifact,
            device=given.device,
            batches=(network.batch,),
            backends=given.backends,
            baselines=given.baselines or tuple(BASELINES),
            beside={BY_HAND: by_hand(built.modules(), given.device)} if network.by_hand else {},
            budget_s=given.budget_s,
            compile_limit_s=given.compile_limit_s,
            threads=given.threads,
            factory=network.model,
            factory_args=form.options,
            pin=given.pin,
            roofline=True,
            alone=given.alone,
        )
    yield {**facts, "report": {**report.to_json(), "name": name}}


def by_hand(modules: Sequence[Any], device: str) -> Callable[..., Any]:
    """Returns the code that a user may write for a frozen trunk: the trunk runs once, then every head.

    The trunk is that of the first member. The heads' outputs are stacked.
    """
    trunk, heads = modules[0].trunk.to(device), [m.head.to(device) for m in modules]

    def run(*args: Any, **kwargs: Any) -> Any:
        h = trunk(*args, **kwargs)[:, 0]
        return torch.stack([head(h) for head in heads])

    return run


def run_real(name: str, rows: Sequence[Mapping[str, Any]], **options: Any) -> Iterator[dict[str, Any]]:
    """Yields the results of a network of the suite `real` as JSON values.

    rows: with their number of members, which is equal, batch and pattern. options: fields of `SuiteOptions`.
    """
    given = SuiteOptions(**options)
    (network,) = chosen_networks([name])
    form = Form(network.options, network.inputs)
    with tempfile.TemporaryDirectory(prefix="widepack-suite-") as folder, quiet(given.threads, given.pin):
        built = Built.of(network.model, form, rows[0]["members"], folder, given)
        modules, ens = built.modules(), widepack.load(built.artifact)
        facts = {**built.facts, "parameters": sum(p.numel() for p in modules[0].parameters())}
        for row in rows:
            seconds = _loop_seconds(ens, modules, row["batch"])
            if seconds > given.call_limit_s:
                yield {**facts, "skipped": f"a call of the loop takes {seconds:.1f} s"}
            else:
                yield {**facts, **_beside_tuned(ens, modules, row, seconds, given, built.artifact)}


def _loop_seconds(ens: widepack.WideModel, modules: Sequence[nn.Module], batch: int) -> float:
    """Returns the seconds of a call of the first member times the number of members."""
    args, kwargs, _ = call_inputs(ens.entry("forward").entry, None, batch, 0, "cpu")
    with torch.inference_mode():
        modules[0](*args, **kwargs)
        return len(modules) * once(lambda: modules[0](*args, **kwargs))


def _beside_tuned(
    ens: widepack.WideModel,
    modules: Sequence[nn.Module],
    row: Mapping[str, Any],
    loop_s: float,
    options: SuiteOptions,
    artifact: str,
) -> dict[str, Any]:
    """Times the artifact, and its tuned copy if requested, against the baselines.

    loop_s: about how many seconds a call of the loop takes.
    """
    others: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    if options.tune:
        with tempfile.TemporaryDirectory(dir=os.path.dirname(artifact)) as place:
            copy = f"{place}/tuned.wide"
            shutil.copytree(artifact, copy, copy_function=os.link)
            extra = tuned(copy, row["batch"], row["pattern"], options)
            others[TUNED] = widepack.load(copy)  # mapped files stay readable without their names
    baselines = options.baselines or tuple(BASELINES)
    contestants = 2 + len(others) + len(baselines)
    report = compare(
        ens,
        modules,
        (row["batch"],),
        baselines=baselines,
        others=others,
        budget_s=max(options.budget_s, LEAST_ROUNDS * contestants * loop_s / 3),
        compile_limit_s=options.compile_limit_s,
        pattern=row["pattern"],
        roofline=options.tune,
    )
    document = report.to_json()
    if not document["rows"]:
        return {"error": "; ".join(report.refused.values()), **extra}
    return {**extra, "environment": document["environment"], "result": document["rows"][0]}
