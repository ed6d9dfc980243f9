"""Tests copies and pickles of loaded models, and NumPy arrays as inputs."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fusing import members
from torch import Tensor, nn

import widepack
from widepack import InputError, UsageError


def same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copies")
    own = members(lambda: nn.Linear(4, 3))
    widepack.fuse(own, torch.randn(2, 4)).save(folder / "e.wide", names=["a", "b", "c"], pt2=False)
    torch.save(nn.Linear(4, 3).state_dict(), folder / "new.pt")
    return folder / "e.wide"


class Rows(torch.utils.data.Dataset[Tensor]):
    """A data set that calls a loaded model in the workers of a DataLoader."""

    def __init__(self, ens: Any) -> None:
        self.ens = ens

    def __len__(self) -> int:
        return 2

    def __getitem__(self, i: int) -> Tensor:
        y: Tensor = self.ens(torch.full((1, 4), float(i)))
        return y.clone()


def test_a_copy_loads_the_artifact_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    ens = widepack.load("e.wide", members=["c", "a"], dtype="float64")
    monkeypatch.chdir("/")
    x = torch.randn(5, 4, dtype=torch.float64)
    for other in (pickle.loads(pickle.dumps(ens)), copy.deepcopy(ens), copy.copy(ens)):
        assert other.members == ("c", "a")
        same(other(x), ens(x))
    other = copy.deepcopy(ens)
    other.swap("a", path.parent / "new.pt")
    assert not torch.equal(other(x), ens(x))


def test_what_a_copy_would_lose_is_refused(path: Path) -> None:
    ens = widepack.load(path)
    ens.swap("b", path.parent / "new.pt")
    for use in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="b was swapped in this process only.*widepack.update"):
            use(ens)
        with pytest.raises(TypeError, match=r"take the model: ens instead of ens.entry\('forward'\)"):
            use(ens.entry("forward"))
    ens.close()
    with pytest.raises(UsageError, match="this model was closed"):
        pickle.dumps(ens)


@pytest.mark.slow
def test_the_workers_of_a_data_loader(path: Path) -> None:
    ens = widepack.load(path)
    loader = torch.utils.data.DataLoader(Rows(ens), num_workers=1, multiprocessing_context="spawn")
    rows = [batch[0] for batch in loader]
    same(rows[1], ens(torch.ones(1, 4)))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor, t: Tensor, scale: float = 2.0) -> Tensor:
        y: Tensor = self.fc(x) * t * scale
        return y


def test_scalars_are_inputs_without_dims_and_constants() -> None:
    fused = widepack.fuse(members(Scaled), (torch.randn(2, 4), torch.tensor(1.0), 3.0))
    x = torch.randn(2, 4)
    same(fused(x.numpy(), np.float32(2.0), np.float32(3.0)), fused(x, torch.tensor(2.0), 3.0))
    with pytest.raises(InputError, match=r"scale is 4.0; the model was built with 3.0"):
        fused(x, np.float32(2.0), np.float32(4.0))
