"""Serves the artifacts of `wire_models` in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import wire_models
from asgi import InProcess
from batches import Batches
from support import Artifacts

import widepack_serve


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory, artifacts: Artifacts) -> dict[str, Path]:
    """Returns the path of each artifact by its name. All test processes share them."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    return {**wire_models.all_built(folder / "wire"), "ragged_heads": artifacts("ragged_heads")}


@pytest.fixture(scope="session")
def server(wide: dict[str, Path]) -> Iterator[InProcess]:
    """Returns a server of all artifacts with the usual settings. Tests must not change it."""
    app = widepack_serve.app(wide)
    started = InProcess(app).start()
    yield started
    started.close()


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> Batches:
    """Returns the batches that run in a test."""
    found = Batches()
    monkeypatch.setattr("widepack_serve.batching.batcher.run_batch", found.run)
    return found


@pytest.fixture
def serve(wide: dict[str, Path]) -> Iterator[Callable[..., InProcess]]:
    """Returns a function that starts a server of an artifact with settings."""
    started: list[InProcess] = []

    def start(name: str = "plain", **settings: Any) -> InProcess:
        started.append(InProcess(widepack_serve.app({name: wide[name]}, **settings)).start())
        return started[-1]

    yield start
    for one in started:
        one.close()
