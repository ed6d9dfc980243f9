"""Tests that a fused module refuses sizes that its members refuse or for which they take another path."""

from __future__ import annotations

import pytest
import torch
from fusing import draw, members
from torch import Tensor, nn

import widepack
from widepack import InputError

close = torch.testing.assert_close


class Row(nn.Module):
    """A module with a norm that refuses one row in train mode. With dropout the program draws."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.drop(self.norm(self.layer(x)))
        return y


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_one_row_is_refused_where_a_norm_of_the_members_trains(dropout: float) -> None:
    fused = widepack.fuse(members(lambda: Row(dropout)), draw(5, 4), validate=False)
    assert fused(draw(1, 4)).shape == (3, 1, 3)
    fused.train()
    before = fused.norm.running_var.clone()
    with pytest.raises(
        InputError,
        match=r"B = 1 .*the member itself fails there: ValueError: Expected more than 1 value "
        r"per channel when training",
    ):
        fused(draw(1, 4))
    assert torch.equal(fused.norm.running_var, before)
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
