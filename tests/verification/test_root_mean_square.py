"""Tests root mean squares of very large and very small numbers, and members that answer with them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from loaded import built
from torch import Tensor, nn

import widepack
from widepack.spec.draws import InputSource, draw, spread_of
from widepack.verification.record import OutputBounds
from widepack.verification.tolerance import ErrorStats, RootMeanSquare, root_mean_square
from widepack_artifacts.reader import Reader


@pytest.mark.parametrize("size", [1e-320, 1e-200, 1e-30, 1.0, 1e30, 1e155, 1e300])
def test_the_size_of_numbers_does_not_matter(size: float) -> None:
    numbers = torch.tensor([3.0, -4.0, 0.0, 5.0], dtype=torch.float64) * size
    right = math.sqrt(50 / 4) * size
    assert root_mean_square(numbers) == pytest.approx(right, rel=1e-3, abs=0)
    found = RootMeanSquare()
    for part in (numbers[:1], numbers[1:1], numbers[1:]):
        found.add(part)
    assert found.count == 4 and found.value == pytest.approx(right, rel=1e-3, abs=0)
    other = RootMeanSquare()
    other.add_value(found.value, 4)
    other.add_value(0.0, 12)
    other.add_value(1.0, 0)
    assert other.count == 16 and other.value == pytest.approx(right / 2, rel=1e-3, abs=0)
    other.raise_to(right)
    other.raise_to(0.0)
    assert other.count == 16 and other.value == pytest.approx(right, rel=1e-3, abs=0)


def test_numbers_without_a_size() -> None:
    assert root_mean_square(torch.zeros(0)) == root_mean_square(torch.zeros(3)) == 0.0
    assert root_mean_square(torch.tensor([1.0, math.inf])) == math.inf
    assert root_mean_square(torch.full((4,), 1e30)) == pytest.approx(1e30)  # over float32, squared
    assert root_mean_square(torch.full((4,), 3e4, dtype=torch.float16)) == pytest.approx(3e4, rel=1e-3)
    assert root_mean_square(torch.full((2,), 3e200 + 4e200j, dtype=torch.complex128)) == pytest.approx(5e200)
    empty = RootMeanSquare()
    empty.raise_to(1.0)
    assert empty.value == 0.0


@pytest.mark.parametrize("size", [1e-320, 1e-200, 1.0, 1e200])
def test_inputs_are_drawn_at_the_size_of_the_example(size: float) -> None:
    example = torch.tensor([[1.0, -2.0], [3.0, 0.5]], dtype=torch.float64) * size
    assert spread_of(example) == pytest.approx(size * 1.78, rel=0.01)
    drawn = draw(InputSource("x", "float64[B,2]", None, None, example), {"B": 6}, 0)
    assert len(set(drawn.flatten().tolist())) > 4
    assert bool((drawn >= example.min()).all()) and bool((drawn <= example.max()).all())


def test_bounds_of_a_record_of_any_size() -> None:
    for size in (1e-200, 1e200):
        stats = ErrorStats.from_bounds(OutputBounds("y", size, size, size), 1e-16)
        assert (stats.scale, stats.own_rms, stats.own_max) == pytest.approx((size, size, size), abs=0)


class Scaled(nn.Module):
    def __init__(self, size: float) -> None:
        super().__init__()
        self.linear, self.size = nn.Linear(4, 3), size

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.size  # type: ignore[no-any-return]


@pytest.mark.extended(keep=2)
@pytest.mark.parametrize("size", [1e-318, 1e-200, 1e155, 1e306])
def test_members_with_answers_of_any_size_are_built(size: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    members = [Scaled(size).double() for _ in range(2)]
    out = built(tmp_path, lambda: Scaled(size).double(), members, "x=float64[B,4]")
    (record,) = Reader(out).manifest.verification["wide"]["shared.0"]
    assert record["own_rms"] > 0 or size < 1e-300, "a wide answer that rounds otherwise is refused"
    x = torch.randn(3, 4, dtype=torch.float64)
    answers, fused = widepack.load(out)(x), widepack.fuse(members, x)(x)
    for i, member in enumerate(members):
        own = member(x).detach()
        for found in (answers[i], fused[i].detach()):
            assert float((found / own - 1).abs().max()) < (1e-12 if size > 1e-300 else 0.5)


def test_a_wrong_answer_of_any_size_is_refused() -> None:
    for size in (1e-200, 1e200):
        truth = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64) * size
        stats = ErrorStats("y")
        stats.add_own(truth, truth)
        stats.add_wide("0", "B=3", truth, truth, truth)
        assert stats.wrong() == ""
        stats.add_wide("1", "B=3", truth * (1 + 1e-12), truth, truth)
        assert "member 1" in stats.wrong()
