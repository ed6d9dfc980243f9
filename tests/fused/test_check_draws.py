"""Tests the comparison of members that draw random numbers with their captured program, from one seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import widepack
from widepack.errors import VerificationError
from widepack.fused.member_runs import LiveMemberRuns

Change = Callable[[list[Tensor]], list[Tensor]]


class Drops(nn.Module):
    """Returns floats and whole numbers behind a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.4), nn.LayerNorm(16), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.net(x)
        return y, y.argmax(-1)


def members(make: Callable[[], nn.Module], dtype: torch.dtype) -> list[nn.Module]:
    found = []
    for i in range(3):
        torch.manual_seed(i)
        found.append(make().to(dtype).train())
    return found


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 8, dropout=0.5, batch_first=True)


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.9), nn.Linear(8, 2))


@pytest.mark.extended(keep=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("make", [Drops, batch_norm, pytest.param(encoder, marks=pytest.mark.extended)])
def test_right_members_are_accepted(make: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    several = members(make, dtype)
    shape = (5, 6, 4) if isinstance(several[0], nn.TransformerEncoderLayer) else (6, 4)
    torch.manual_seed(9)
    x = torch.randn(shape, dtype=dtype)
    widepack.fuse(several, x)(x)


CHANGES: dict[str, tuple[Change, str]] = {
    "eps": (lambda y: [y[0] * (1 + 1e-4), y[1]], r"error .* \(bound"),
    "largest": (lambda y: [y[0] + 2e-4 * (y[0] == y[0].max()), y[1]], r"largest error .* \(bound"),
    "nan": (lambda y: [y[0].masked_fill(y[0] == y[0].max(), torch.nan), y[1]], "NaN or inf in other places"),
    "whole": (lambda y: [y[0], y[1] + 1], "5 of 5 values differ"),
    "shape": (lambda y: [y[0][:1], y[1]], r"shape \[1, 3\], the member's own \[5, 3\]"),
    "dtype": (lambda y: [y[0].double(), y[1]], r"torch.float64, the member's own torch.float32"),
    "count": (lambda y: y[:1], "1 outputs, the module's own 2"),
}


@pytest.mark.extended(keep=2)
@pytest.mark.parametrize("change", CHANGES)
def test_a_capture_of_other_numbers_is_refused(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    how, words = CHANGES[change]

    run_program = LiveMemberRuns.run_program

    def changed(runs: LiveMemberRuns, program: Any, *args: Any, **kwargs: Any) -> Any:
        outputs, gradients = run_program(runs, program, *args, **kwargs)
        return (how(outputs) if program is runs.entry.programs[0] else outputs), gradients

    monkeypatch.setattr(LiveMemberRuns, "run_program", changed)
    x = torch.randn(5, 4)
    with pytest.raises(VerificationError, match=f"from the module of member 0, with the same seed.*{words}"):
        widepack.fuse(members(Drops, torch.float32), x)(x)
