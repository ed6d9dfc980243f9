"""Runs one row of the suite: writes random checkpoints, builds the artifact, tunes it, and compares it."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import widepack
from widepack.spec.dtypes import DTYPES

from ..baselines.table import BASELINES
from ..measure.processors import quiet
from ..models.factory import factory_of
from ..models.weights import write_checkpoints
from ..processes.fresh import in_fresh_process
from ..report.document import Report
from .bench import bench
from .rows import SuiteRow
from .table import BY_HAND

REGRET_LIMIT_S = 1800.0  # Seconds that the second measurement of a plan may take.


@dataclass(frozen=True, slots=True)
class NetworkOptions:
    """Options of a row. All are JSON values, because a row runs in its own process.

    tune: measure the artifact's plan for the row's batch first, and write it into the artifact. The result
    then has the measured times, and how much slower the plan is than the best candidate (`regret.py`). The
    others are as in `bench`; empty baselines mean all. dtype: of the weights and the inputs; empty for
    float32.
    """

    baselines: Sequence[str] = ()
    backends: Sequence[str] = ("auto",)
    budget_s: float = 20.0
    compile_limit_s: float = 120.0
    threads: int = 1
    pin: bool = False
    alone: bool = False
    tune: bool = False
    device: str = "cpu"
    dtype: str = ""


def run_row(row: SuiteRow, size: str, options: NetworkOptions | None = None) -> dict[str, Any]:
    """Runs one row in a temporary folder, and returns its results as JSON values. size: `cpu` or `full`."""
    options = options or NetworkOptions()
    tuned: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="widepack-suite-") as folder:
        make, form = factory_of(row.model), row.form(size)
        paths = write_checkpoints(partial(make, **form.options), row.members, folder, row.shared)
        begin = time.perf_counter()
        artifact = f"{folder}/{row.name}.wide"
        # On a GPU no contestant computes on the CPU: the build may use all of it.
        torch.set_num_threads(options.threads if options.device == "cpu" else os.cpu_count() or 1)
        widepack.build(
            paths,
            artifact,
            model=row.model,
            model_args=dict(form.options),
            inputs=in_dtype(form.inputs, options.dtype),
            dtype=options.dtype or None,
            targets=(torch.device(options.device).type,),
            pt2=False,
        )
        build_s = time.perf_counter() - begin
        if options.tune:
            tuned["tune"], backends = _tune(artifact, row.batch, options, folder)
        report = _compare(row, size, artifact, paths, options)
        if options.tune:
            tuned["again"] = _regret(artifact, row.batch, backends, options)
        weights_bytes = sum(os.path.getsize(f) for f in Path(artifact).glob("weights-*"))
    document = {**report.to_json(), "name": row.name}
    return {"build_s": build_s, "weights_bytes": weights_bytes, **tuned, "report": document}


def in_dtype(inputs: Sequence[str], dtype: str) -> list[str]:
    """Returns input specs with another floating dtype. dtype: empty for the same specs."""
    return [spec.replace("=float32[", f"={dtype}[") if dtype else spec for spec in inputs]


def _tune(
    artifact: str, batch: int, options: NetworkOptions, folder: str
) -> tuple[dict[str, Any], Sequence[str]]:
    """Tunes the artifact. Returns the measured times, and the backends that were tried."""
    begin = time.perf_counter()
    with quiet(options.threads, options.pin):
        report = widepack.tune(
            artifact,
            batches=(batch,),
            patterns=("shared",),
            budget_s=options.budget_s,
            device=options.device,
            write=True,
        )
    # The reason why a candidate was dropped may name a file of the temporary folder.
    rows = json.loads(json.dumps(report.to_json()["rows"]).replace(f"{folder}/", ""))
    return {"seconds": time.perf_counter() - begin, "rows": rows}, report.backends


def _compare(
    row: SuiteRow, size: str, artifact: str, paths: Sequence[str], options: NetworkOptions
) -> Report:
    """Times the artifact against the baselines."""
    make, arguments = factory_of(row.model), row.form(size).options
    beside = {}
    if row.by_hand:
        filled = [_filled(make(**arguments), p).to(DTYPES[options.dtype or "float32"]) for p in paths]
        beside[BY_HAND] = by_hand(filled, options.device)
    return bench(
        artifact,
        device=options.device,
        batches=(row.batch,),
        backends=options.backends,
        baselines=options.baselines or tuple(BASELINES),
        beside=beside,
        budget_s=options.budget_s,
        compile_limit_s=options.compile_limit_s,
        threads=options.threads,
        factory=row.model,
        factory_args=arguments,
        pin=options.pin,
        roofline=True,
        alone=options.alone,
    )


def _regret(artifact: str, batch: int, backends: Sequence[str], options: NetworkOptions) -> dict[str, Any]:
    """Measures all candidates again, in another process."""
    arguments = {
        "artifact": artifact,
        "batch": batch,
        "backends": backends,
        "budget_s": options.budget_s,
        "threads": options.threads,
        "pin": options.pin,
        "device": options.device,
    }
    return in_fresh_process("widepack_bench.suite.regret:regret", arguments, limit_s=REGRET_LIMIT_S)


def _filled(module: Any, path: str) -> Any:
    module.load_state_dict(torch.load(path, mmap=True, weights_only=True))
    return module.eval()


def by_hand(modules: Sequence[Any], device: str) -> Callable[..., Any]:
    """Returns the code that a user may write for a frozen trunk: the trunk runs once, then every head.

    The trunk is that of the first member. The heads' outputs are stacked.
    """
    trunk, heads = modules[0].trunk.to(device), [m.head.to(device) for m in modules]

    def run(*args: Any, **kwargs: Any) -> Any:
        h = trunk(*args, **kwargs)[:, 0]
        return torch.stack([head(h) for head in heads])

    return run
