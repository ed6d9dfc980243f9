"""Defines the fixtures for the tests of the writer and the reader."""

from __future__ import annotations

from pathlib import Path

import pytest
from stores import build

from widepack_artifacts.manifest import Manifest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ens.wide"


@pytest.fixture
def built(path: Path) -> Manifest:
    return build(path)
