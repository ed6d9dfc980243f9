"""Tests that rounding is not taken for a wrong program, and that a wrong program is still found."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import widepack
from widepack.errors import VerificationError
from widepack.verification import equivalent_runs, wide
from widepack.verification.equivalent_runs import Evaluations
from widepack.verification.tolerance import ErrorStats


class Buckets(nn.Module):
    """Whole numbers that rounding decides: a BatchNorm is folded into the convolution before it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.last = nn.Conv2d(16, 4, 3)
        assert self.norm.running_mean is not None and self.norm.running_var is not None
        nn.init.normal_(self.norm.running_mean)
        nn.init.uniform_(self.norm.running_var, 0.3, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = (self.norm(self.conv(x)) * 30).round().long()
        return y


class Quantised(Buckets):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = (self.norm(self.conv(x)) * 3000).round() / 3000
        return y


def members(make: type[nn.Module]) -> list[nn.Module]:
    found = []
    for i in range(3):
        torch.manual_seed(i + 30)
        found.append(make().eval())
    return found


@pytest.mark.parametrize("make", [Buckets, Quantised])
def test_a_near_tie_is_no_wrong_program(make: type[nn.Module]) -> None:
    """On an AMD EPYC the wide program of `Buckets` gives another whole number at one place of 6144."""
    several = members(make)
    x = torch.randn(4, 3, 8, 8)
    widepack.fuse(several, x)(x)


def test_one_evaluation_alone_is_refused_where_a_tie_is_decided_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The wide program decides one more tie otherwise; what no evaluation decides so is wrong."""
    own = wide.wide_answers
    moved: list[int] = []

    def answers(*args: object) -> object:
        for call, i, outputs in own(*args):  # type: ignore[arg-type]
            moved.append(1)
            yield call, i, [outputs[0] + (torch.arange(outputs[0].numel()) == 7).reshape(outputs[0].shape)]

    monkeypatch.setattr(wide, "wide_answers", answers)
    x = torch.randn(4, 3, 8, 8)
    with pytest.raises(VerificationError, match="values differ from the member's own"):
        widepack.fuse(members(Buckets), x)(x)
    assert moved


def evaluations(truth: Tensor, *errors: float) -> Evaluations:
    return Evaluations(equal=[[(truth + e).float()] for e in errors])


def stats(own: float, wide: float, truth: Tensor, several: Evaluations) -> ErrorStats:
    found = ErrorStats("y")
    found.add_own((truth + own).float(), truth)
    bound = found.max_bound
    equivalent_runs.raise_errors(found, 0, [(several, truth)], bound)
    answer, own_answer = (truth + wide).float(), (truth + own).float()
    least = equivalent_runs.own_rms(several, 0, truth, bound)
    own_answer, best = equivalent_runs.nearest(answer, own_answer, truth, several.of(0), bound)
    found.add_wide("0", "B=2", answer, own_answer, best, least)
    return found


def test_the_own_error_is_the_largest_of_several_evaluations() -> None:
    truth = torch.linspace(1, 2, 100, dtype=torch.float64)
    several = evaluations(truth, 1.2e-4, -0.5e-4)
    assert stats(1e-4, 2.3e-4, truth, evaluations(truth)).wrong()
    assert not stats(1e-4, 2.3e-4, truth, several).wrong()
    assert stats(1e-4, 2.6e-4, truth, several).wrong(), "the factor of the bound stays"


def test_a_near_tie_counts_only_where_an_evaluation_has_it() -> None:
    truth = torch.linspace(1, 2, 100, dtype=torch.float64)
    tie = truth.clone()
    tie[3] += 0.5
    several = Evaluations(nudged=[[tie.float()]])
    wrong = truth.clone()
    wrong[4] += 0.5
    own = truth.float()
    for answer, same in ((tie, True), (wrong, False)):
        _, best = equivalent_runs.nearest(answer.float(), own, truth, several.of(0), 1e-5)
        assert torch.allclose(answer, best) == same
    whole = torch.arange(6)
    other = whole.clone()
    other[2] = 9
    expected, _ = equivalent_runs.nearest(other, whole, whole, [other], 0.0)
    assert torch.equal(expected, other)
    expected, _ = equivalent_runs.nearest(other + 1, whole, whole, [other], 0.0)
    assert torch.equal(expected, whole)
