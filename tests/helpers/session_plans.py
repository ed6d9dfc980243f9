"""Gives artifacts plans that name ONNX Runtime, as a build with time to measure may do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import widepack
from widepack.planning.plan import Plan
from widepack.system.machine import name_of
from widepack.tuning.graph_files import publish_graphs
from widepack.tuning.report import publish_plans
from widepack_artifacts.program import Program


def plan_sessions(
    path: Path,
    *,
    patterns: Sequence[str] = ("shared", "each"),
    times_ms: Mapping[str, float] | None = None,
    least: int = 1,
) -> str:
    """Publishes loops in sessions as the plans of an artifact, with the graphs.

    times_ms: of a call with one row, by the name of the plan. least: the smallest batch of these plans; other
    plans serve smaller ones. Returns: the new digest.
    """
    ens, predicted = widepack.load(path, strategies="loop"), widepack.load(path)
    plans: dict[tuple[str, str], list[tuple[Program, Plan]]] = {}
    measured: dict[str, Any] = {"machine": name_of("cpu"), "threads": torch.get_num_threads()}
    for name in ens.entries:
        for pattern in patterns:
            stored = ens.entry(name).programs.of(pattern)[0].stored
            times: dict[str, Any] = {"at": 1, "times_ms": dict(times_ms)} if times_ms else {}
            plan = replace(stored.plan, backend="onnxruntime", batch=(least, None), **measured, **times)
            rows = [(stored.program, plan)]
            if least > 1:
                small = predicted.entry(name).programs.of(pattern)[0].stored
                rows.insert(0, (small.program, replace(small.plan, batch=(1, least - 1), **measured)))
            plans[name, pattern] = rows
    return publish_graphs(path, publish_plans(path, "cpu", plans, ens.manifest.digest))
