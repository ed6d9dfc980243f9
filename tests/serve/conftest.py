"""Serves the artifacts of `wire_models` in this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import wire_models
from asgi import InProcess

import widepack_serve


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Returns the path of each artifact by its name. All test processes share them."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    return wire_models.all_built(folder / "wire")


@pytest.fixture(scope="session")
def server(wide: dict[str, Path]) -> Iterator[InProcess]:
    """Returns a server of all artifacts with the usual settings. Tests must not change it."""
    app = widepack_serve.app(wide)
    started = InProcess(app).start()
    yield started
    started.close()
