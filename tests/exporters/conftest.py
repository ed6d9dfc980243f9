"""Builds the artifacts that the tests export, once for all test files of this folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from exporters.export_models import HEADS, NET, NETS, SMALL, STEPS, Head, Step, artifact_of


@pytest.fixture(scope="session")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return artifact_of(NETS, tmp_path_factory, **NET)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return artifact_of(SMALL, tmp_path_factory, **NET, model_args={"attends": False})


@pytest.fixture(scope="session")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return artifact_of(HEADS, tmp_path_factory, model=Head, inputs=["x=float32[B,4]"])


@pytest.fixture(scope="session")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return artifact_of(
        STEPS, tmp_path_factory, model=Step, inputs=["x=float32[B,4]", "h=float32[B,6]"], state=["steps", "h"]
    )


@pytest.fixture(scope="session")
def onnx() -> Any:
    for package in ("onnx", "onnxruntime", "onnxscript"):
        pytest.importorskip(package, reason=f"writing ONNX needs {package}, from the extra onnx")
    return pytest.importorskip("onnx")
