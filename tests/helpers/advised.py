"""Loads an artifact as advice is about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from widepack_bench.advice.machine_times import times_here
from widepack_bench.advice.subject import AdvisedArtifact, Workload


def advised(path: Path, folder: Path, **changed: Any) -> AdvisedArtifact:
    """Returns an artifact with a batch of 8 on one thread. changed: fields of `Workload`."""
    values: dict[str, Any] = {"path": path, "entry": "", "pattern": "shared", "batch": 8, "threads": 1}
    return AdvisedArtifact.of(Workload(**{**values, **changed}), times_here(1, "float32"), folder)
