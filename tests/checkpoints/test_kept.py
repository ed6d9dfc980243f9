"""Tests the memory of tensors that no file has."""

from __future__ import annotations

import resource

import pytest
import torch

from widepack import CheckpointError
from widepack.checkpoints.loading import kept


def test_a_folder_without_space_is_an_error() -> None:
    tensor, before = torch.randn(1 << 20), resource.getrlimit(resource.RLIMIT_FSIZE)
    assert torch.equal(kept(tensor), tensor)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(CheckpointError, match="set TMPDIR"):
            kept(tensor)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
