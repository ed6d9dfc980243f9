"""Tests that a loaded model keeps freed memory in its process, and when it does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import widepack

CALLS = """
import resource, sys, torch, widepack
torch.set_num_threads(1)
ens = widepack.load(sys.argv[1], backend="eager", memory=sys.argv[2])
x = torch.randn(512, 64)
for _ in range(3):
    ens(x)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    ens(x)
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 10)
"""


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory")
    models = [nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 4)) for _ in range(8)]
    out = folder / "m.wide"
    widepack.fuse(models, torch.randn(4, 64), strategy="wide").save(out, pt2=False)
    return out


def faults(artifact: Path, memory: str = "auto", **environment: str) -> float:
    """Returns the pages that a call takes from the system, in a fresh process."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_", "WIDEPACK_KEEP"))}
    done = subprocess.run(
        [sys.executable, "-c", CALLS, str(artifact), memory],
        env={**kept, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc returns memory in this way")
def test_calls_take_no_pages_again(artifact: Path) -> None:
    assert faults(artifact) < 100


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc returns memory in this way")
@pytest.mark.parametrize(
    ("memory", "environment"),
    [
        ("auto", {"WIDEPACK_KEEP_MEMORY": "0"}),
        ("least", {}),
        ("auto", {"MALLOC_TRIM_THRESHOLD_": "131072"}),
        ("auto", {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}),
    ],
)
def test_the_user_can_switch_it_off(artifact: Path, memory: str, environment: dict[str, str]) -> None:
    assert faults(artifact, memory, **environment) > 1000
