"""The tests of a GPU are skipped on a machine without a GPU. `WIDEPACK_TEST_DEVICE=cpu pytest tests/gpu` runs
them on the CPU, to check the tests.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tf32_settings import without_tf32

DEVICE = os.environ.get("WIDEPACK_TEST_DEVICE", "cuda")
MISSING = torch.device(DEVICE).type == "cuda" and not torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if MISSING:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def device() -> Iterator[str]:
    """Yields the device of a test. Float32 products are in float32, because TF32 keeps ten bits of each
    factor.
    """
    with without_tf32():
        yield DEVICE
