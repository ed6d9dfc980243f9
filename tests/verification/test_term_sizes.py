"""Tests the scale of answers that are zero but for rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from loaded import save_members
from torch import Tensor, nn

import widepack
from widepack.verification import term_sizes
from widepack.verification.tolerance import ErrorStats

EPS = torch.finfo(torch.float32).eps


class Centered(nn.Module):
    """Returns an answer, and a mean that is 0 but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.a(x)
        h = h - h.mean(1, keepdim=True)
        return self.b(h), h.mean(1)


def test_an_artifact_whose_output_is_zero_but_for_rounding(tmp_path: Path) -> None:
    paths = save_members(Centered, tmp_path, 3)
    widepack.build(paths[:2], tmp_path / "e.wide", model=Centered, sample=(torch.randn(4, 5),), pt2=False)
    ens, x = widepack.load(tmp_path / "e.wide"), torch.randn(6, 5)
    ens.swap(1, paths[2])
    alone = Centered()
    alone.load_state_dict(torch.load(paths[2]))
    answers = ens(x)
    torch.testing.assert_close(answers[0][1], alone(x)[0])
    assert 0 < float(answers[1].abs().max()) < 1e-6
    assert widepack.load(tmp_path / "e.wide", dtype=torch.float64)(x.double())[1].abs().max() < 1e-15
    widepack.update(tmp_path / "e.wide", {1: paths[2]})
    widepack.load(tmp_path / "e.wide")


def test_the_bound_is_below_a_lost_term() -> None:
    output = ErrorStats("mean")
    own = torch.full((64,), 1e-8)
    output.add_own(own, torch.zeros(64, dtype=torch.float64))
    assert output.unsteady()
    output.terms = 0.05
    assert not output.unsteady()
    assert output.max_bound == pytest.approx(4e-8 + 4 * EPS * 0.05)
    output.add_wide("0", "B=64", own - 2.5e-8, own, torch.zeros(64, dtype=torch.float64))
    assert output.wrong() == ""
    output.add_wide("1", "B=64", own + 0.05 / 10_000, own, torch.zeros(64, dtype=torch.float64))
    assert "member 1" in output.wrong()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_answers_with_a_size_keep_their_bounds(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancellation in a part of the terms, as in every sum, changes no scale."""
    noted: list[list[ErrorStats]] = []
    scale = term_sizes.scale_by_terms

    def note(answered: Any, coarse: Any) -> None:
        scale(answered, coarse)
        noted.append(answered.stats)

    monkeypatch.setattr("widepack.verification.answers.scale_by_terms", note)

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(50, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, 2)).to(dtype)

    widepack.fuse([make().train() for _ in range(2)], torch.randn(16, 50, dtype=dtype))
    assert noted
    assert all(output.terms == 0 for stats in noted for output in stats)


def test_a_member_that_draws_is_no_sum_of_zero(tmp_path: Path) -> None:
    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.a(x)
            y = y - self.a(x) + 1e-3 * torch.rand_like(y)
            return y

    with pytest.raises(widepack.WidepackError):
        widepack.build(
            save_members(Draws, tmp_path),
            tmp_path / "e.wide",
            model=Draws,
            sample=(torch.randn(4, 5),),
            pt2=False,
        )
