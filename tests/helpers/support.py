"""Shares helpers between tests: artifacts of the cases, new processes, the bound of comparisons."""

from __future__ import annotations

import fcntl
import math
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cases
from widepack import BuildReport, build
from widepack.ir.torch_internals import without_fast_path


class Artifacts:
    """`artifacts("mlp")` returns the path of the artifact with the default plan; `"wide"` selects a strategy.

    folder: shared by all workers of a run. The other workers open what one worker has built.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reports: dict[tuple[str, str], BuildReport] = {}

    def __call__(self, name: str, strategy: str = "auto") -> Path:
        path = self.folder / name / f"{strategy}.wide"
        if (name, strategy) not in self.reports:
            case = cases.load(name)
            more: dict[str, Any] = {} if strategy == "auto" else {"pt2": False, "targets": ("cpu",)}
            report = self.folder / f"{name}.{strategy}.report"
            with (self.folder / f"{name}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not report.exists():
                    built = build(
                        self.checkpoints(name),
                        path,
                        model=case.model,
                        inputs=case.INPUTS,
                        strategy=strategy,
                        **more,
                    )
                    report.write_bytes(pickle.dumps(built))
            self.reports[name, strategy] = pickle.loads(report.read_bytes())
        return path

    def report(self, name: str, strategy: str = "auto") -> BuildReport:
        self(name, strategy)
        return self.reports[name, strategy]

    def checkpoints(self, name: str) -> list[str]:
        folder = self.folder / name
        if not folder.is_dir():
            return cases.write_checkpoints(name, folder)
        return [str(folder / f"{name}-{i}.pt") for i in range(cases.load(name).N)]


def quick_first(names: Sequence[str]) -> list[Any]:
    """Returns the names as cases of a test. Those outside of `cases.QUICK` are extended."""
    return [n if n in cases.QUICK else pytest.param(n, marks=pytest.mark.extended) for n in names]


def fresh(code: str, *words: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a new Python process with one thread. `words` are its `sys.argv[1:]`."""
    command = [sys.executable, "-W", "error", "-c", code, *map(str, words)]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )


def must(done: subprocess.CompletedProcess[str]) -> str:
    """Checks that a process succeeded, and returns its output."""
    assert done.returncode == 0, done.stderr
    return done.stdout


def run(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs one member without gradients."""
    with without_fast_path(), torch.no_grad():
        return module(*args, **kwargs)


def double(value: Any) -> Any:
    """Casts every floating tensor of a call to float64."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {k: double(v) for k, v in value.items()}
    return tuple(map(double, value)) if isinstance(value, (tuple, list)) else value


def leaves(result: Any) -> list[Tensor]:
    """Returns the tensors in a member's result, in order."""
    if isinstance(result, Tensor):
        return [result]
    rows = (
        result.values()
        if isinstance(result, Mapping)
        else result
        if isinstance(result, (tuple, list))
        else ()
    )
    return [leaf for row in rows for leaf in leaves(row)]


def stack(values: Sequence[Any]) -> Any:
    """Stacks the inputs of N calls: every tensor becomes `[N, ...]`."""
    first = values[0]
    if isinstance(first, Tensor):
        return torch.stack(list(values))
    if isinstance(first, Mapping):
        return {k: stack([v[k] for v in values]) for k in first}
    return tuple(stack(v) for v in zip(*values)) if isinstance(first, (tuple, list)) else first


@dataclass
class Bound:
    """Checks one output by DESIGN.md, "Correct means". Errors are against float64, of all members together.

    The rms error is at most 2x that of the members + 1 ulp, and the largest error at most 4x theirs + 4 ulp,
    of the output's rms.
    """

    alone: list[Tensor] = field(default_factory=list)
    truth: list[Tensor] = field(default_factory=list)
    wide: list[Tensor] = field(default_factory=list)

    def add(self, wide: Tensor, alone: Tensor, truth: Tensor) -> None:
        assert wide.shape == alone.shape
        assert wide.dtype == alone.dtype
        self.eps = torch.finfo(alone.dtype).eps
        fine = torch.isfinite(alone)
        assert torch.equal(fine, torch.isfinite(wide))
        assert torch.equal(alone[~fine].nan_to_num(), wide[~fine].nan_to_num())
        self.truth.append(truth[fine].flatten())
        self.alone.append(alone[fine].flatten().double() - self.truth[-1])
        self.wide.append(wide[fine].flatten().double() - self.truth[-1])

    def check(self) -> None:
        alone, truth = torch.cat(self.alone), torch.cat(self.truth)
        assert alone.numel() >= 64
        ulp = self.eps * float(truth.square().mean().sqrt())
        rms, largest = 2 * float(alone.square().mean().sqrt()) + ulp, 4 * float(alone.abs().max()) + 4 * ulp
        assert math.isfinite(rms)
        for error in self.wide:
            assert float(error.square().mean().sqrt()) <= rms
            assert float(error.abs().max()) <= largest
