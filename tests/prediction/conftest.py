"""Builds the artifacts of these tests once, and a table of rows for the first of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from loaded import saved

from prediction.members import Centered, Classes, Net, Paired, Steps, Tokens
from widepack.inference.model import WideModel

ROWS = 700


def _built(factory: Any, tmp: pytest.TempPathFactory, *inputs: str, **options: Any) -> WideModel:
    return saved(factory, tmp.mktemp(factory.__name__), *inputs, **options)


@pytest.fixture(scope="session")
def net(tmp_path_factory: pytest.TempPathFactory) -> WideModel:
    """Returns four members m0 to m3: x [B, 6] -> [B, 3]."""
    return _built(Net, tmp_path_factory, "x=float32[B,6]")


@pytest.fixture(scope="session")
def artifact(net: WideModel) -> str:
    """Returns the path of the artifact of `net`."""
    return str(net.__reduce__()[0].args[0])  # type: ignore[attr-defined]


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> WideModel:
    """Returns members of two inputs, ids [B, T] and scale [B], and two outputs, logits [B, 3] and
    map [B, 2, 3].
    """
    return _built(Tokens, tmp_path_factory, "ids=int64[B,T]:0..9", "scale=float32[B]")


@pytest.fixture(scope="session")
def centered(tmp_path_factory: pytest.TempPathFactory) -> WideModel:
    """Returns members whose rows are not independent."""
    return _built(Centered, tmp_path_factory, "x=float32[B,6]")


@pytest.fixture(scope="session")
def steps(tmp_path_factory: pytest.TempPathFactory) -> WideModel:
    """Returns members with the rows in dim 1: x [5, B, 4] -> [5, B, 2]."""
    return _built(Steps, tmp_path_factory, "x=float32[5,B,4]")


@pytest.fixture(scope="session")
def paired(tmp_path_factory: pytest.TempPathFactory) -> WideModel:
    """Returns members that take batches of an even size."""
    return _built(Paired, tmp_path_factory, "x=float32[B,6]")


@pytest.fixture(scope="session")
def classes(tmp_path_factory: pytest.TempPathFactory) -> WideModel:
    """Returns members that answer the number of a class: x [B, 1] -> int64 [B]."""
    return _built(Classes, tmp_path_factory, "x=float32[B,1]")


@pytest.fixture(scope="session")
def x() -> torch.Tensor:
    """Returns the rows of `table`, [ROWS, 6]."""
    return torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns an empty folder, which is the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def pa() -> Any:
    """Returns pyarrow with the submodules that tests use."""
    pyarrow = pytest.importorskip("pyarrow", reason="tables need pyarrow, from the extra predict")
    for name in ("csv", "ipc", "parquet"):
        pytest.importorskip(f"pyarrow.{name}")
    return pyarrow


@pytest.fixture(scope="session")
def table(pa: Any, x: torch.Tensor, net: WideModel) -> Any:
    """Returns a table: id (text), f0 to f5 (float32), tenant (the names of members)."""
    return pa.table(
        {
            "id": [f"{i:05d}" for i in range(ROWS)],
            **{f"f{k}": pa.array(x[:, k].tolist(), pa.float32()) for k in range(6)},
            "tenant": [net.members[i * i % 4] for i in range(ROWS)],
        }
    )
