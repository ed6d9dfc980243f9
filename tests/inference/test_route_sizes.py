"""Tests `route` for rows in other dims, other sizes, groups that guards forbid, and transposed inputs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from loaded import saved
from torch import Tensor, nn

from inference.small_networks import EvenFromFour
from widepack import InputError


class Steps(nn.Module):
    """Takes sequences with the time first. Steps depend on each other, and rows do not."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x.cumsum(0))
        return y


def test_rows_in_the_second_dim(tmp_path: Path) -> None:
    ens = saved(Steps, tmp_path, "x=float32[T,B,6]")
    rows = ens.manifest.entries["forward"].rows
    assert rows is not None and str(rows) == "independent along B"
    x, ids = torch.randn(5, 4, 6), [2, 0, 2, 1]
    found, whole = ens.route(x, member=ids), ens(x)
    assert found.shape == (5, 4, 3)
    torch.testing.assert_close(found, torch.stack([whole[i, :, r] for r, i in enumerate(ids)], 1))
    with pytest.raises(InputError, match="member has 5 values, and the call has 4 rows"):
        ens.route(x, member=[0] * 5)


class MergedSteps(nn.Module):
    """A trunk and a head on all steps of all rows, which are one dim between them."""

    def __init__(self, time_first: bool, own: bool) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(torch.initial_seed() if own else 7)
            self.trunk = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
        self.head = nn.Linear(8, 3)
        self.time_first = time_first

    def forward(self, x: Tensor) -> Tensor:
        first, second, width = x.shape
        y: Tensor = self.head(self.trunk(x.reshape(first * second, width))).view(first, second, 3)
        return y.transpose(0, 1) if self.time_first else y


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("time_first", [False, True])
def test_a_trunk_over_steps_of_any_number(time_first: bool, own: bool, tmp_path: Path) -> None:
    spec = "x=float32[T,B,6]" if time_first else "x=float32[B,T,6]"
    ens = saved(lambda: MergedSteps(time_first, own), tmp_path, spec)
    rows = ens.manifest.entries["forward"].rows
    assert rows is not None and rows.proved, rows
    for steps in (3, 2, 7, 8):
        x, ids = torch.randn(4, steps, 6), [2, 0, 2, 1]
        found = ens.route(x.transpose(0, 1) if time_first else x, member=ids)
        for row, i in enumerate(ids):
            one = x[row : row + 1].transpose(0, 1) if time_first else x[row : row + 1]
            torch.testing.assert_close(found[row], ens(one.contiguous())[i, 0])


def test_groups_of_rows_are_as_large_as_the_model_takes(tmp_path: Path) -> None:
    ens = saved(EvenFromFour, tmp_path, "x=float32[B,2,5]", "B=4..64")
    x = torch.randn(8, 2, 5)
    whole = ens(x)
    for ids in ([0, 1, 1, 1, 1, 1, 1, 1], [0, 1, 2, 3, 0, 1, 2, 3], [2, 2, 2, 1, 1, 1, 1, 1], [3] * 8):
        found = ens.route(x, member=ids)
        torch.testing.assert_close(found, torch.stack([whole[i, r] for r, i in enumerate(ids)]))
    with pytest.raises(InputError):
        ens.route(x[:3], member=[0, 0, 0])


@pytest.mark.extended
def test_a_member_takes_transposed_inputs(tmp_path: Path) -> None:
    """A capture has views of its contiguous example, where the module reshapes."""
    ens = saved(lambda: MergedSteps(True, True), tmp_path, "x=float32[T,B,6]")
    x = torch.randn(4, 3, 6).transpose(0, 1)
    torch.testing.assert_close(ens[1](x), ens(x.contiguous())[1])
    torch.testing.assert_close(ens.route(x, member=1), ens(x.contiguous())[1])
