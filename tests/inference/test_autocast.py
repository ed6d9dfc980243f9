"""Tests that a loaded artifact answers in the dtypes of its programs under `torch.autocast`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from loaded import files_of
from small_builds import QUICK
from support import Artifacts
from torch import Tensor, nn

import cases
import widepack


def autocast() -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def same(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["mlp", "lstm"])
def test_autocast_does_not_change_loads_and_calls(name: str, artifacts: Artifacts) -> None:
    """An LSTM runs over packed weights, which torch's autocast cannot convert."""
    case, path = cases.load(name), artifacts(name)
    args, kwargs = case.sample(3, 0)
    xs = [torch.stack([a] * case.N) for a in args]
    plain = widepack.load(path)
    with autocast():
        ens = widepack.load(path)
        again = widepack.load(path, strategies="loop")
        pairs = [
            (ens(*args, **kwargs), plain(*args, **kwargs)),
            (ens.each(*xs, **kwargs), plain.each(*xs, **kwargs)),
            (ens[1](*args, **kwargs), plain[1](*args, **kwargs)),
            (again(*args, **kwargs), again(*args, **kwargs)),
        ]
        ens.probe()
        assert torch.is_autocast_enabled("cpu")
    same(pairs[0][0], plain(*args, **kwargs))
    same(pairs[1][0], plain.each(*xs, **kwargs))
    same(pairs[2][0], plain[1](*args, **kwargs))
    for inside, outside in pairs:
        same(inside, outside)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 8)
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.norm(self.fc(x)))
        return y


def test_artifacts_are_built_updated_and_exported_under_autocast(tmp_path: Path) -> None:
    members = [Net() for _ in range(3)]
    paths = files_of(tmp_path, members)
    with autocast():
        widepack.build(paths[:2], tmp_path / "a.wide", model=Net, inputs=["x=float32[B,4]"], **QUICK)
        widepack.append(tmp_path / "a.wide", [paths[2]])
        ens = widepack.load(tmp_path / "a.wide")
        ens.swap(0, paths[1])
        x = torch.randn(5, 4)
        y = ens(x)
    expected = torch.stack([members[i](x) for i in (1, 1, 2)])
    torch.testing.assert_close(y, expected.detach(), rtol=1e-5, atol=1e-6)
