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
    widepack.fuse(models, torch.randn(4, 64), strategy="wide", validate=False).save(out, pt2=False)
    return out


def figure(code: str, artifact: Path, memory: str = "auto", **environment: str) -> float:
    """Returns the number that some code prints in a fresh process."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_", "WIDEPACK_KEEP"))}
    done = subprocess.run(
        [sys.executable, "-c", code, str(artifact), memory],
        env={**kept, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout)


@pytest.mark.extended
@pytest.mark.skipif(sys.platform != "linux", reason="only glibc returns memory in this way")
def test_calls_take_no_pages_again(artifact: Path) -> None:
    assert figure(CALLS, artifact) < 100


SETTINGS = """
import sys, widepack
from widepack.system.memory import keep_freed
widepack.load(sys.argv[1], backend="eager", memory=sys.argv[2])
called = keep_freed.cache_info().currsize
print(int(bool(called) and keep_freed()))
"""


@pytest.mark.extended(keep=1)
@pytest.mark.skipif(sys.platform != "linux", reason="only glibc returns memory in this way")
@pytest.mark.parametrize(
    ("memory", "environment", "kept"),
    [
        ("auto", {}, 1),
        ("auto", {"WIDEPACK_KEEP_MEMORY": "0"}, 0),
        ("least", {}, 0),
        ("auto", {"MALLOC_TRIM_THRESHOLD_": "131072"}, 0),
        ("auto", {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}, 0),
    ],
)
def test_the_user_can_switch_it_off(
    artifact: Path, memory: str, environment: dict[str, str], kept: int
) -> None:
    assert figure(SETTINGS, artifact, memory, **environment) == kept
