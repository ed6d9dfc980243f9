"""Tests the scale of answers that are zero but for rounding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded import save_members
from small_builds import QUICK
from torch import Tensor, nn

import widepack
from widepack.verification import answers, rounding
from widepack.verification.subject import AnsweredCalls, Subject
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
    widepack.build(paths[:2], tmp_path / "e.wide", model=Centered, sample=(torch.randn(4, 5),), **QUICK)
    ens, x = widepack.load(tmp_path / "e.wide"), torch.randn(6, 5)
    ens.swap(1, paths[2])
    alone = Centered()
    alone.load_state_dict(torch.load(paths[2]))
    found = ens(x)
    torch.testing.assert_close(found[0][1], alone(x)[0])
    assert 0 < float(found[1].abs().max()) < 1e-6
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


class NormWithOffset(nn.Module):
    """Returns an answer behind a norm of numbers with an offset, and the mean that the norm makes 0."""

    def __init__(self, norm: nn.Module, dims: tuple[int, ...], channels_last: bool = False) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Conv2d(3, 16, 3, padding=1), norm, nn.Conv2d(16, 4, 1)
        self.dims, self.channels_last = dims, channels_last
        nn.init.constant_(self.a.bias, 400.0)  # type: ignore[arg-type]  # it has one

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.a(x)
        if self.channels_last:
            h = h.to(memory_format=torch.channels_last)
        h = self.norm(h)
        return self.b(h), h.mean(self.dims)


@pytest.mark.parametrize(
    ("norm", "dims"),
    [
        (lambda: nn.GroupNorm(16, 16), (2, 3)),
        (lambda: nn.GroupNorm(4, 16, affine=False), (1, 2, 3)),
        (lambda: nn.InstanceNorm2d(16, affine=True), (2, 3)),
        (lambda: nn.LayerNorm([16, 7, 7], bias=False), (1, 2, 3)),
        (lambda: nn.LayerNorm(7), (3,)),
    ],
)
def test_the_mean_behind_a_norm_of_numbers_with_an_offset(
    norm: Callable[[], nn.Module], dims: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mean has no size. The answer keeps float64 as its reference, and the members' error against it."""
    noted: list[AnsweredCalls] = []
    collect = answers.collect

    def note(*given: Any) -> AnsweredCalls:
        noted.append(collect(*given))
        return noted[-1]

    monkeypatch.setattr("widepack.verification.answers.collect", note)
    torch.manual_seed(0)
    members = [NormWithOffset(norm(), dims) for _ in range(2)]
    widepack.fuse(members, torch.randn(4, 3, 7, 7))
    assert noted
    for answered in noted:
        answer, mean = answered.stats
        assert answered.float64 and answer.terms == 0
        assert answer.own_rms > 1e-5 * answer.scale
        assert mean.terms > 100 * mean.answers.value
        assert mean.rms_bound() < 1e-3


def test_the_message_says_that_float64_is_no_reference() -> None:
    """torch's kernel for channels-last images loses all digits here."""
    torch.manual_seed(0)
    members = [NormWithOffset(nn.GroupNorm(16, 16), (2, 3), channels_last=True) for _ in range(2)]
    with pytest.raises(widepack.VerificationError) as refused:
        widepack.fuse(members, torch.randn(4, 3, 7, 7))
    text = str(refused.value)
    assert "may be wrong" in text and "Rounding alone changes the members' own answers by" in text
    assert "from the members' own answers" in text and "1e-05 of their scale counts as their own" in text
    assert "own largest error in their own dtype" not in text


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_answers_with_a_size_keep_their_bounds(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancellation in a part of the terms, as in every sum, changes no scale."""
    noted: list[list[ErrorStats]] = []
    scale = rounding.scale_by_terms

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
            **QUICK,
        )


@pytest.mark.parametrize("few", [True, False])
def test_too_little_memory_for_float64_is_no_missing_kernel(
    few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bound from the members' own answers is wider."""

    why = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes" if few else "no kernel"

    def fails(inputs: Any) -> Any:
        raise RuntimeError(why)

    monkeypatch.setattr(Subject, "float64_function", lambda *_: fails)
    members = [nn.Linear(3, 2) for _ in range(2)]
    if few:
        with pytest.raises(RuntimeError, match="tried to allocate"):
            widepack.fuse(members, torch.randn(4, 3))
    else:
        widepack.fuse(members, torch.randn(4, 3))
