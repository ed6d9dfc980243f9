"""The artifact that the tests of advice are about."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from advised import advised
from support import Artifacts

from widepack_bench.advice.subject import AdvisedArtifact


@pytest.fixture
def subject(artifacts: Artifacts, tmp_path: Path) -> Iterator[AdvisedArtifact]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    path = artifacts("mlp")
    with torch.inference_mode():
        yield advised(path, tmp_path)
    torch.set_num_threads(before)
