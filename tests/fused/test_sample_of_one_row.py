"""Tests samples of one row: dims that may change stay dynamic."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import widepack
from widepack import fuse


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))


class Squeezed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x).squeeze(0)
        return y


class Flat(Squeezed):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x.reshape(1, -1))
        return y


class Kept(Squeezed):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(1, 2))
        self.last: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.last + self.layer(x)
        return self.last * 1.0


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z: Tensor = self.layer(x).sum(0) + self.layer(y).sum(0)
        return z


@pytest.mark.extended(keep=2)
@pytest.mark.parametrize("dynamic", [None, {"input": {0: "B"}}])
@pytest.mark.parametrize("mode", [True, False])
def test_the_batch_is_dynamic(dynamic: Any, mode: bool) -> None:
    fused = fuse(lambda: net().train(mode), torch.randn(1, 6), n=2, dynamic=dynamic)
    for rows in (1, 5):
        x = torch.randn(rows, 6)
        expected = torch.stack([m(x) for m in fused.unfuse()])
        torch.testing.assert_close(fused(x), expected)
    assert copy.deepcopy(fused)(torch.randn(5, 6)).shape == (2, 5, 2)


def test_a_batch_norm_trains_from_a_sample_of_one_row() -> None:
    fused = fuse(lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), torch.randn(1, 6), n=2)
    assert fused(torch.randn(5, 6)).shape == (2, 5, 4)


def test_a_member_of_one_row_keeps_the_sample() -> None:
    x = torch.randn(1, 6)
    for make in (Squeezed, Flat):
        fused = fuse(make, x, n=2)
        torch.testing.assert_close(fused(x), torch.stack([m(x) for m in fused.unfuse()]))
    named = fuse(Squeezed, x, n=2, dynamic={"x": {0: "B"}})
    assert named(torch.randn(5, 6)).shape == (2, 5, 2)
    with pytest.raises(widepack.CaptureError, match=r"fixes a size .* x has 1 at axis 0 \(B\)"):
        fuse(Flat, x, n=2, dynamic={"x": {0: "B"}})


def test_a_buffer_of_one_row_keeps_its_shape() -> None:
    fused = fuse(Kept, torch.randn(1, 6), n=2).train()
    members, x = fused.unfuse(), torch.randn(1, 6)
    for _ in range(2):
        torch.testing.assert_close(fused(x), torch.stack([m(x) for m in members]))


def test_dims_of_one_stay_different_dims() -> None:
    axes = {"x": {0: "B"}, "y": {0: "T"}}
    fused = fuse(Pair, (torch.randn(1, 6), torch.randn(1, 6)), n=2, dynamic=axes)
    assert fused(torch.randn(5, 6), torch.randn(3, 6)).shape == (2, 2)


def test_a_build_from_a_sample_of_one_row(tmp_path: Path) -> None:
    torch.save(net().state_dict(), tmp_path / "0.pt")
    widepack.build(
        [tmp_path / "0.pt"], tmp_path / "e.wide", model=net, sample=(torch.randn(1, 6),), race=False
    )
    ens = widepack.load(tmp_path / "e.wide")
    assert ens(torch.randn(5, 6)).shape == (1, 5, 2) and ens(torch.randn(1, 6)).shape == (1, 1, 2)
