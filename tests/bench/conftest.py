"""Kernel times that are measured fast, and the artifact that the tests of advice are about."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from advised import advised
from support import Artifacts

from widepack.kernel_times import calibration
from widepack_bench.advice.subject import AdvisedArtifact


@pytest.fixture(scope="session", autouse=True)
def short_blocks() -> Iterator[None]:
    """Lets a process measure the rates of this machine in a second, and less exactly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "BLOCK_S", 1e-4)
        patch.setattr(calibration, "BLOCKS", 2)
        yield


@pytest.fixture
def subject(artifacts: Artifacts, tmp_path: Path) -> Iterator[AdvisedArtifact]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    path = artifacts("mlp")
    with torch.inference_mode():
        yield advised(path, tmp_path)
    torch.set_num_threads(before)
