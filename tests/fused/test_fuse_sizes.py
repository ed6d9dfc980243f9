"""Tests that a fused module refuses sizes that its members refuse or take another path for, and that
dims stay dynamic if the sample has one row.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from fusing import draw, members
from torch import Tensor, nn

import widepack
from widepack import InputError, fuse

close = torch.testing.assert_close


def row(dropout: float) -> nn.Module:
    """Returns a module with a norm that refuses one row in train mode. With dropout the program draws."""
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(dropout))


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_one_row_is_refused_where_a_norm_of_the_members_trains(dropout: float) -> None:
    fused = widepack.fuse(members(lambda: row(dropout)), draw(5, 4), validate=False)
    assert fused(draw(1, 4)).shape == (3, 1, 3)
    fused.train()
    before = fused.get_buffer("1.running_var").clone()
    with pytest.raises(
        InputError,
        match=r"B = 1 .*the member itself fails there: ValueError: Expected more than 1 value "
        r"per channel when training",
    ):
        fused(draw(1, 4))
    assert torch.equal(fused.get_buffer("1.running_var"), before)
    assert fused(draw(2, 4)).isfinite().all()


def test_norms_without_statistics_are_of_the_batch_in_eval_mode_too() -> None:
    modules = members(lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False)))
    fused = widepack.fuse(modules, draw(5, 4))
    close(fused(draw(3, 4)), torch.stack([m(draw(3, 4)) for m in modules]), rtol=1e-5, atol=1e-6)
    with pytest.raises(InputError, match=r"B = 1 .*the model is valid for 2 <= B"):
        fused(draw(1, 4))


class Squeezed(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(4, 1), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.drop(self.layer(x)).squeeze()
        return y


def test_a_program_that_differs_at_one_row_runs_for_other_sizes() -> None:
    modules = members(lambda: Squeezed(0.5))
    fused = widepack.fuse(modules, draw(5, 4))
    close(fused(draw(2, 4)), torch.stack([m(draw(2, 4)) for m in modules]), rtol=1e-5, atol=1e-6)
    for mode in (False, True):
        with pytest.raises(InputError, match=r"B = 1 .*the member gives \[\] there, its program \[1\]"):
            fused.train(mode)(draw(1, 4))
        assert fused(draw(2, 4)).shape == (3, 2)


def test_a_first_call_under_autocast_makes_and_compares_a_plain_program() -> None:
    modules = members(lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)))
    x = draw(5, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fused = widepack.fuse(modules, x)
        y, right = fused(x), torch.stack([m(x) for m in modules])
        assert fused.train()(x).dtype == y.dtype == right.dtype == torch.bfloat16
    close(y, right, rtol=2e-2, atol=2e-2)
    close(fused(x), torch.stack([m(x) for m in modules]), rtol=1e-5, atol=1e-6)


class ReadsTheTenthRow(nn.Module):
    """Is valid from ten rows on, which is more than the batches at which plans are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x) + x[9, :2]
        return y


def test_a_module_that_needs_many_rows_is_fused() -> None:
    models, x = [ReadsTheTenthRow() for _ in range(2)], torch.randn(12, 4)
    for mode in (True, False):
        fused = widepack.fuse([m.train(mode) for m in models], x)
        torch.testing.assert_close(fused(x), torch.stack([m(x) for m in models]))


# ---------------------------------------------------------------- samples of one row


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))


class SqueezedRow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x).squeeze(0)
        return y


class Flat(SqueezedRow):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x.reshape(1, -1))
        return y


class Kept(SqueezedRow):
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
    for make in (SqueezedRow, Flat):
        fused = fuse(make, x, n=2)
        torch.testing.assert_close(fused(x), torch.stack([m(x) for m in fused.unfuse()]))
    named = fuse(SqueezedRow, x, n=2, dynamic={"x": {0: "B"}})
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
    widepack.build([tmp_path / "0.pt"], tmp_path / "e.wide", model=net, sample=(torch.randn(1, 6),), budget=0)
    ens = widepack.load(tmp_path / "e.wide")
    assert ens(torch.randn(5, 6)).shape == (1, 5, 2) and ens(torch.randn(1, 6)).shape == (1, 1, 2)
