"""A layer's members as users run them: an artifact, its plan measured on this machine (`widepack.tune`), loaded.

Beside `in_memory.py`, what a call takes has the checks of its inputs in it, and a plan may name every backend that is here.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import widepack
from widepack.spec.entries import FORWARD
from widepack.system.machine import name_of

from ..errors import BenchError
from .in_memory import AUTO, BATCH, Way
from ..report.document import commit
from ..suite.run import write_whole

ARTIFACT, CACHE, RECORD = "layer.wide", "cache", "tuned.json"


def _marked(layer: nn.Module) -> nn.Module:
    """A layer without weights of its own, with a number beside it: checkpoints hold tensors."""
    layer.register_buffer("mark", torch.zeros(()))
    return layer


def tuned(
    make: Callable[[], nn.Module],
    modules: Sequence[nn.Module],
    specs: Sequence[str],
    batch: int,
    folder: Path,
    *,
    pattern: str = "each",
    device: str = "cpu",
    budget_s: float = 4.0,
    said: Callable[[str], None] = lambda stage: None,
) -> dict[str, Any]:
    """Build and tune the artifact of these members in a folder; what was measured. A folder that holds the same, finished, is left as it is, any other content goes. torch's number of threads is the caller's.

    make: a fresh member in eval mode. modules: the members, whose weights it takes. specs: inputs as `widepack build --input` takes them. folder: for the artifact and compiled programs.
    budget_s: of `tune`. Raises: what building and tuning raise.
    """
    of = {
        "layer": str(modules[0]),
        "members": len(modules),
        "inputs": list(specs),
        "batch": batch,
        "pattern": pattern,
        "device": name_of(device),
        "threads": torch.get_num_threads(),
        "budget_s": budget_s,
        "commit": commit(),
        "versions": {"widepack": widepack.__version__, "torch": torch.__version__},
    }
    record = folder / RECORD
    if record.exists() and (folder / ARTIFACT).exists():
        found: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
        if found.get("of") == of:
            return found
    if folder.exists() and any(folder.iterdir()) and not any((folder / name).exists() for name in (RECORD, ARTIFACT, "000.pt")):
        raise BenchError(f"{folder} holds something else than a tuned layer; give another folder to --artifacts")
    shutil.rmtree(folder, ignore_errors=True)  # of another layer, machine or version
    folder.mkdir(parents=True)
    marked = not modules[0].state_dict()
    paths = [str(folder / f"{i:03}.pt") for i in range(len(modules))]
    for i, (module, path) in enumerate(zip(modules, paths)):
        torch.save({"mark": torch.tensor(float(i))} if marked else module.state_dict(), path)
    begun = time.perf_counter()
    said("building an artifact")
    widepack.build(
        paths,
        folder / ARTIFACT,
        model=(lambda: _marked(make())) if marked else make,
        inputs=[re.sub(rf"\b{BATCH}\b", str(batch), spec) for spec in specs],  # baselines are compiled for the exact shapes, too
        targets=(torch.device(device).type,),
        pt2=False,
    )
    built = time.perf_counter()
    (row,) = widepack.tune(
        folder / ARTIFACT,
        batches=(batch,),  # which has no name in the artifact
        patterns=(pattern,),
        budget_s=budget_s,
        device=device,
        cache=folder / CACHE,
        write=True,
        progress=lambda stage, done, total: said(f"tuning: {stage}"),
    ).rows
    chosen: dict[str, Any] = {
        "of": of,
        "build_s": built - begun,
        "tune_s": time.perf_counter() - built,
        "chosen": row.chosen,
        "backend": row.backend,
        "strategies": row.strategies,
        "times_ms": row.times_ms,
        "dropped": {name: why.replace(f"{folder}/", "") for name, why in row.dropped.items()},
    }
    for path in paths:
        Path(path).unlink()
    write_whole(record, chosen)
    return chosen


def opened(folder: Path, chosen: Mapping[str, Any], *, pattern: str, device: str) -> Way:
    """The loaded artifact of a folder as a contestant. Raises: what loading raises; BenchError where the plan that was measured is not the one that runs."""
    ens = widepack.load(folder / ARTIFACT, device=device, cache=folder / CACHE)
    run = ens.each if pattern == "each" else ens
    (bound,) = ens.entry(FORWARD).programs.of(pattern)
    if bound.backend != chosen["backend"] or dict(bound.plan.times_ms) != chosen["times_ms"]:
        raise BenchError(
            f"the plan that was measured, {chosen['chosen']} on {chosen['backend']}, is not the one that the artifact runs here, on {bound.backend}; "
            f"remove {folder} and tune again"
        )
    return Way(AUTO, (f"{chosen['chosen']}{'' if chosen['backend'] in chosen['chosen'] else ' on ' + chosen['backend']}",), run)


def place_of(root: str, name: str, count: int) -> Path:
    """Where the artifact of N members of a layer is."""
    return Path(root) / f"{name.replace(':', '-')}-{count}"
