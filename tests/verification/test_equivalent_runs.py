"""Tests that rounding is not taken for a wrong program, and that a wrong program is still found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import widepack
from widepack.capture.call import arrange
from widepack.capture.capture import capture
from widepack.errors import VerificationError
from widepack.verification import equivalent_runs, reference
from widepack.verification.equivalent_runs import Evaluations
from widepack.verification.tolerance import ErrorStats
from widepack_artifacts.program import Program


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


@pytest.mark.extended(keep=1)
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
    own = reference.WideRun.answers
    moved: list[int] = []

    def answers(run: reference.WideRun) -> object:
        for call, i, outputs in own(run):
            moved.append(1)
            yield call, i, [outputs[0] + (torch.arange(outputs[0].numel()) == 7).reshape(outputs[0].shape)]

    monkeypatch.setattr(reference.WideRun, "answers", answers)
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
    least = equivalent_runs.own_rms(several, 0, own_answer, truth, bound)
    own_answer, best = equivalent_runs.nearest(answer, own_answer, truth, several.of(0), bound)
    found.add_wide("0", "B=2", answer, own_answer, best, least)
    return found


def test_the_own_error_is_the_largest_of_several_evaluations() -> None:
    truth = torch.linspace(1, 2, 100, dtype=torch.float64)
    several = evaluations(truth, 1.2e-4, -0.5e-4)
    assert stats(1e-4, 2.3e-4, truth, evaluations(truth)).wrong()
    assert not stats(1e-4, 2.3e-4, truth, several).wrong()
    assert stats(1e-4, 2.6e-4, truth, several).wrong(), "the factor of the bound stays"
    larger = evaluations(truth, 4e-4)
    assert not stats(1.2e-4, 4.7e-4, truth, larger).wrong()
    assert stats(1.2e-4, 5e-4, truth, larger).wrong(), "an evaluation counts twice the first error at most"


def test_a_refusal_names_rounding_only_where_it_is_as_large_as_the_error() -> None:
    truth = torch.linspace(1, 2, 100, dtype=torch.float64)
    for wide, doubted in ((6e-4, True), (9e-4, False)):
        found = stats(1e-4, wide, truth, evaluations(truth))
        assert found.wrong()
        found.doubt_rounding(4e-4)
        assert bool(found.doubt) == doubted


def test_numbers_moved_by_one_ulp_are_an_equal_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    own, evaluate, found = reference.WideRun.answers, equivalent_runs.evaluate, []

    def answers(run: reference.WideRun) -> object:
        for call, i, outputs in own(run):
            yield call, i, [outputs[0] + 1e-2]

    def collect(*args: Any) -> Evaluations:
        found.append((evaluate(*args), args[4].own[args[1]][0]))
        return found[-1][0]

    monkeypatch.setattr(reference.WideRun, "answers", answers)
    monkeypatch.setattr(equivalent_runs, "evaluate", collect)
    several = [nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, track_running_stats=False)) for _ in range(3)]
    with pytest.raises(VerificationError, match="is wrong"):
        widepack.fuse(several, torch.randn(5, 4))(torch.randn(5, 4))
    for evaluations, answer in found:  # without oneDNN, moved; rows are not independent
        assert len(evaluations.equal) == 2
        assert 0 < (evaluations.equal[1][0] - answer).abs().max() < 1e-2


def test_a_near_tie_counts_only_where_the_other_decision_has_it() -> None:
    truth = torch.linspace(1, 2, 100, dtype=torch.float64)
    tie = truth.clone()
    tie[3] += 0.5
    several = Evaluations(decided=[[tie]])
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


def program_of(function: Callable[[Tensor], Tensor], x: Tensor) -> Program:
    class Module(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    return capture(Module, arrange(Module(), [x], {}, {}, {})).program


@pytest.mark.extended(keep=2)
@pytest.mark.parametrize(
    ("function", "others"),
    [
        (lambda x: (x / 3).round(), {0, 1}),
        (lambda x: (x / 3 > 0.5).float(), {0, 1}),
        (lambda x: torch.where(x / 3 > 0.5, 4.0, x), {4}),
        (lambda x: (x / 3).floor_divide(0.5), {0, 1}),
    ],
)
def test_only_a_decision_within_the_margin_changes(
    function: Callable[[Tensor], Tensor], others: set[int]
) -> None:
    x = torch.linspace(0.1, 2.9, 24).reshape(3, 8)  # thirds of these, around a half
    x[1, 3] = 1.5 * (1 + 2**-23)  # its third is half an ulp from the threshold
    program = program_of(function, x)
    truth = function(x.double())
    found = equivalent_runs.other_decisions(program, [], [x])
    assert len(found) == equivalent_runs.DRAWS
    changed = torch.stack([(y[0] - truth).abs() > 1e-3 for y in found])
    assert bool(changed[:, 1, 3].any()) and not bool(changed[:, 0].any()) and not bool(changed[:, 2].any())
    assert {round(float(y[0][1, 3])) for y in found if (y[0] - truth)[1, 3].abs() > 1e-3} <= others | {2}


@pytest.mark.parametrize("function", [lambda x: (x == 0).float(), lambda x: x.round(), lambda x: x.argmax(1)])
def test_numbers_without_an_error_have_no_margin(function: Callable[[Tensor], Tensor]) -> None:
    """An input is not rounded: a wide program that decides otherwise about it is wrong."""
    x = torch.tensor([[0.0, 0.5, 0.5, 1.5, 2.5, 0.0, 1.0, 2.5]])
    assert equivalent_runs.other_decisions(program_of(function, x), [], [x]) == []


def test_a_program_that_decides_nothing_has_no_near_ties() -> None:
    x = torch.randn(3, 8)
    assert equivalent_runs.other_decisions(program_of(lambda x: torch.relu(x).softmax(1), x), [], [x]) == []


def test_values_of_a_topk_stay_and_its_numbers_change() -> None:
    x = torch.tensor([[3.0, 1.0, 3.0 * (1 - 2**-24), 0.5]])
    program = program_of(lambda x: (x / 7).topk(2).values, x)
    assert all(
        torch.equal(y[0], (x.double() / 7).topk(2).values)
        for y in equivalent_runs.other_decisions(program, [], [x])
    )
