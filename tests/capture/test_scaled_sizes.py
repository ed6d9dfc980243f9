"""Tests sizes that are computed as a size by a fraction, as `interpolate` does with its scales."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import chain
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import widepack
from widepack.errors import CaptureError
from widepack.ir.guards import ratio_of

SIZES = [*range(300), *range(2**20, 2**20 + 60), *range(2**31 - 60, 2**31)]


@pytest.mark.parametrize("number", [0.5, 0.25, 1.5, 2.0, 0.6, 1.7, 0.1, 1.2, 1 / 3, 0.29, 0.7, 1.1, math.pi])
def test_a_ratio_is_exact_at_all_sizes(number: float) -> None:
    ratio = ratio_of(number)
    floors = [math.floor(n * number) for n in SIZES]
    ceils = [math.ceil(n * number) for n in SIZES]
    if ratio is None:  # the ratio that is meant is indeed another number at some size
        meant = Fraction(number).limit_denominator(1000)
        assert (floors, ceils) != (
            [math.floor(n * meant) for n in SIZES],
            [math.ceil(n * meant) for n in SIZES],
        )
        return
    a, b = ratio.numerator, ratio.denominator
    assert [n * a // b for n in SIZES] == floors
    assert [-(-n * a // b) for n in SIZES] == ceils


def test_numbers_without_a_ratio() -> None:
    assert [ratio_of(n) for n in (0.7, 1.1, 0.0, -0.5, math.inf, math.nan, 1e-9, 1e12)] == [None] * 8
    assert ratio_of(0.6) == Fraction(3, 5)


class Scaled(nn.Module):
    """Resizes by scales below and above 1, as they are and computed again, and cuts rows by a fraction."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up = nn.Conv2d(3, 2, 1), nn.Upsample(scale_factor=0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.conv(x)
        n = x.shape[2]
        return (
            self.up(y),
            F.interpolate(y, scale_factor=0.5, mode="bilinear"),
            F.interpolate(y, scale_factor=(1.7, 0.6), recompute_scale_factor=True),
            F.interpolate(y, scale_factor=1.5, mode="bilinear", recompute_scale_factor=True),
            F.interpolate(y, scale_factor=0.25, mode="area"),
            F.interpolate(y, scale_factor=0.5, mode="bicubic"),
            y[:, :, : math.ceil(n * 0.3)],
            y[:, :, : math.floor(0.75 * n)],
        )


def fused(make: type[nn.Module], example: Tensor, dims: dict[int, str]) -> tuple[Sequence[nn.Module], Any]:
    torch.manual_seed(0)
    members = [make().eval() for _ in range(2)]
    return copy.deepcopy(members), widepack.fuse(members, (example,), dynamic={"x": dims})


def test_scaled_sizes_agree_with_each_member() -> None:
    members, model = fused(Scaled, torch.randn(3, 3, 8, 12), {0: "B", 2: "H", 3: "W"})
    for shape in ((3, 8, 12), (2, 7, 10), (1, 13, 9), (2, 5, 4), (1, 10, 25)):
        x = torch.randn(shape[0], 3, *shape[1:])
        with torch.no_grad():
            wide, alone = model(x), [member(x) for member in members]
        for got, want in zip(chain.from_iterable(zip(*wide)), chain.from_iterable(alone), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


class Below(nn.Module):
    """Truncates below zero, where `trunc` is not `floor`, so that it stays refused."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        sym_int: Callable[[Any], int] = torch.sym_int
        y: Tensor = self.fc(x)
        return y + sym_int((5 - x.shape[0]) * 0.5)


def test_a_number_that_may_be_negative_is_no_quotient() -> None:
    with pytest.raises(CaptureError, match=r"by trunc\(\)"):
        fused(Below, torch.randn(4, 3), {0: "B"})
