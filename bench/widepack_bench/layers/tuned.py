"""Builds, tunes and loads the artifact of a layer's members, as users run it.

In contrast to `in_memory.py`, a call includes the input checks, and a plan may use every backend of this
machine.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import widepack
from widepack.spec.entries import FORWARD
from widepack.system.machine import name_of

from ..errors import BenchError
from ..report.environment import commit
from ..report.json_file import write_whole
from .in_memory import AUTO, BATCH, WideContestant

ARTIFACT, CACHE, RECORD = "layer.wide", "cache", "tuned.json"


@dataclass(frozen=True, slots=True)
class TuneRequest:
    """What to tune. inputs: specs as `widepack build --input` takes them. budget_s: seconds of
    `widepack.tune`.
    """

    inputs: Sequence[str]
    batch: int
    pattern: str = "each"
    device: str = "cpu"
    budget_s: float = 4.0


def tuned(
    make: Callable[[], nn.Module],
    modules: Sequence[nn.Module],
    request: TuneRequest,
    folder: Path,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> dict[str, Any]:
    """Builds and tunes the artifact of these members in a folder, and returns the measured plan.

    A folder that has the finished artifact of the same request is used as it is. The artifact of another
    request is replaced. The number of threads is torch's current number.

    make: makes a member in eval mode. modules: the members. folder: for the artifact and compiled programs.
    Raises: BenchError where the folder has other files; whatever building and tuning raise.
    """
    subject = _subject(modules, request)
    if (earlier := _earlier(folder, subject)) is not None:
        return earlier
    _clear(folder)
    has_weights = bool(modules[0].state_dict())
    paths = [str(folder / f"{i:03}.pt") for i in range(len(modules))]
    for i, (module, path) in enumerate(zip(modules, paths)):
        torch.save(module.state_dict() if has_weights else {"mark": torch.tensor(float(i))}, path)
    begin = time.perf_counter()
    on_stage("building an artifact")
    widepack.build(
        paths,
        folder / ARTIFACT,
        model=make if has_weights else lambda: _marked(make()),
        # Baselines are compiled for the exact shapes, too.
        inputs=[re.sub(rf"\b{BATCH}\b", str(request.batch), spec) for spec in request.inputs],
        targets=(torch.device(request.device).type,),
        pt2=False,
    )
    built = time.perf_counter()
    plan = {
        "of": subject,
        "build_s": built - begin,
        **_measured_plan(folder, request, on_stage),
    }
    for path in paths:
        Path(path).unlink()
    write_whole(folder / RECORD, plan)
    return plan


def _subject(modules: Sequence[nn.Module], request: TuneRequest) -> dict[str, Any]:
    """Returns all that a measured plan depends on."""
    return {
        "layer": str(modules[0]),
        "members": len(modules),
        "inputs": list(request.inputs),
        "batch": request.batch,
        "pattern": request.pattern,
        "device": name_of(request.device),
        "threads": torch.get_num_threads(),
        "budget_s": request.budget_s,
        "commit": commit(),
        "versions": {"widepack": widepack.__version__, "torch": torch.__version__},
    }


def _earlier(folder: Path, subject: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the plan of an earlier run of the same subject; None where the folder has none."""
    record = folder / RECORD
    if not record.exists() or not (folder / ARTIFACT).exists():
        return None
    plan: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
    return plan if plan.get("of") == subject else None


def _clear(folder: Path) -> None:
    """Makes the folder empty. Raises: BenchError where it has files that no tuned layer has."""
    if (
        folder.exists()
        and any(folder.iterdir())
        and not any((folder / name).exists() for name in (RECORD, ARTIFACT, "000.pt"))
    ):
        raise BenchError(
            f"{folder} contains files that do not belong to a tuned layer. Give another "
            "folder to --artifacts."
        )
    shutil.rmtree(folder, ignore_errors=True)  # An artifact of another layer, machine or version.
    folder.mkdir(parents=True)


def _marked(layer: nn.Module) -> nn.Module:
    """Adds a buffer to a layer without weights: a checkpoint must have a tensor."""
    layer.register_buffer("mark", torch.zeros(()))
    return layer


def _measured_plan(folder: Path, request: TuneRequest, on_stage: Callable[[str], None]) -> dict[str, Any]:
    """Tunes the artifact in a folder, and returns the plan and the time it took."""
    begin = time.perf_counter()
    (row,) = widepack.tune(
        folder / ARTIFACT,
        batches=(request.batch,),  # The artifact has no named batch dim.
        patterns=(request.pattern,),
        budget_s=request.budget_s,
        device=request.device,
        cache=folder / CACHE,
        write=True,
        progress=lambda stage, done, total: on_stage(f"tuning: {stage}"),
    ).rows
    return {
        "tune_s": time.perf_counter() - begin,
        "chosen": row.chosen,
        "backend": row.backend,
        "strategies": row.strategies,
        "times_ms": row.times_ms,
        "dropped": {name: why.replace(f"{folder}/", "") for name, why in row.dropped.items()},
    }


def open_tuned(folder: Path, plan: Mapping[str, Any], *, pattern: str, device: str) -> WideContestant:
    """Loads the artifact of a folder as a contestant.

    Raises: BenchError where the loaded plan is not the measured one; whatever loading raises.
    """
    ens = widepack.load(folder / ARTIFACT, device=device, cache=folder / CACHE)
    run = ens.each if pattern == "each" else ens
    (bound,) = ens.entry(FORWARD).programs.of(pattern)
    if bound.backend != plan["backend"] or dict(bound.plan.times_ms) != plan["times_ms"]:
        raise BenchError(
            f"{folder}: the measured plan is {plan['chosen']} on {plan['backend']}, but the loaded artifact "
            f"runs another plan, on {bound.backend}. Remove the folder and tune again."
        )
    on_backend = "" if plan["backend"] in plan["chosen"] else f" on {plan['backend']}"
    return WideContestant(AUTO, (f"{plan['chosen']}{on_backend}",), run)


def place_of(root: str, name: str, count: int) -> Path:
    """Returns the folder for the artifact of N members of a layer."""
    return Path(root) / f"{name.replace(':', '-')}-{count}"
