"""Tests members whose answers have a far larger range than their inputs, and other sizes in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from loaded import built
from torch import Tensor, nn

import widepack
from widepack.errors import ProbeError
from widepack.verification import probe
from widepack.verification.record import OutputBounds
from widepack.verification.tolerance import few_count


class Rate(nn.Module):
    """Answers with the exponent of a layer, as models of rates and variances do."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 6)
        with torch.no_grad():
            self.layer.weight.mul_(factor)

    def forward(self, x: Tensor) -> Tensor:
        rate: Tensor = self.layer(x).exp()
        return rate


def rates(seed: int, factor: float) -> list[Rate]:
    made = []
    for i in range(3):
        torch.manual_seed(seed * 10 + i)
        made.append(Rate(factor))
    return made


@pytest.mark.parametrize(
    ("seed", "factor", "spread"),
    [(2, 1.0, 50.0), (3, 1.0, 50.0), (0, 10.0, 0.0), (2, 6.0, 0.0), (3, 6.0, 0.0)],
)
def test_answers_of_exp_build_and_load(tmp_path: Path, seed: int, factor: float, spread: float) -> None:
    torch.manual_seed(int(spread > 0))
    x = torch.rand(32, 8) * spread if spread else torch.randn(32, 8)
    given: dict[str, Any] = {"sample": (x,)} if spread else {"inputs": ["x=float32[B,8]"]}
    members = rates(seed, factor)
    path = built(tmp_path, lambda: Rate(factor), members, **given)
    expected = torch.stack([m.double()(x.double()) for m in members]).detach()
    error = (widepack.load(path)(x).double() - expected).abs() / expected
    assert float(error.max()) < 1e-4


def test_a_record_is_as_large_as_the_recorded_answers_allow() -> None:
    tensors = {"shared.y0.0": probe.thin(torch.tensor([1.0, 2.0]), 1)}
    row: dict[str, Any] = {"output": "", "scale": 1e9, "own_rms": 1e6, "own_max": 1e7}
    bounds = OutputBounds("", row["own_max"], row["own_rms"], row["scale"])
    with pytest.raises(ProbeError, match="has scale 1.00e\\+09"):
        probe.check_bounds(tensors, "shared", [bounds])
    fitted = probe.fitted("forward", {"wide": {"shared.0": [row]}, "truth": "float64"}, tensors)
    (found,) = fitted["wide"]["shared.0"]
    assert found["scale"] == 2e4 and fitted["truth"] == "float64"
    probe.check_bounds(
        tensors, "shared", [OutputBounds("", found["own_max"], found["own_rms"], found["scale"])]
    )
    usual = {"output": "", "scale": 2.0, "own_rms": 1e-7, "own_max": 1e-6}
    assert probe.fitted("forward", {"wide": {"shared.0": [usual]}}, tensors)["wide"]["shared.0"] == [usual]


@pytest.mark.parametrize(
    ("values", "few"),
    [
        (torch.randn(100, generator=torch.Generator().manual_seed(0)), False),
        (torch.tensor([1.0] * 5 + [0.0] * 95), False),
        (torch.tensor([1e30, 9e29, 1.0] + [0.1] * 30), True),
        (torch.tensor([1e300] + [1.0] * 30, dtype=torch.float64), True),
        (torch.tensor([1e30, 1.0, 2.0]), False),
        (torch.zeros(40), False),
        (torch.ones(40, dtype=torch.bool), False),
        (torch.tensor([10**9] + [0] * 39), False),
    ],
)
def test_few_numbers_count_where_others_are_far_smaller(values: Tensor, few: bool) -> None:
    assert few_count(values) is few


class Exponents(nn.Module):
    """Reads the exponents of floats from their bits, of which float64 has other numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y.view(torch.int32) >> 23


def test_bits_of_floats_are_compared_in_their_own_dtype(tmp_path: Path) -> None:
    members = [Exponents() for _ in range(3)]
    path, x = built(tmp_path, Exponents, members, "x=float32[B,4]"), torch.randn(5, 4)
    assert torch.equal(widepack.load(path)(x), torch.stack([m(x) for m in members]))


class RealParts(nn.Module):
    """Takes complex numbers, and conjugates some of them itself."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 5, dtype=torch.complex64))

    def forward(self, z: Tensor) -> Tensor:
        y = z @ self.w
        return y.abs() + z.real.sum(-1, keepdim=True) + y.conj().real + z.conj().imag.sum(-1, keepdim=True)


def test_a_conjugated_view_is_an_input(tmp_path: Path) -> None:
    members = [RealParts() for _ in range(3)]
    ens = widepack.load(built(tmp_path, RealParts, members, "z=complex64[B,6]"))
    z = torch.randn(3, 6, dtype=torch.complex64).conj()
    expected = torch.stack([m(z) for m in members]).detach()
    torch.testing.assert_close(ens(z), expected)
    torch.testing.assert_close(ens.each(z.expand(3, 3, 6)), expected)
    torch.testing.assert_close(ens.route(z, member=[0, 1, 2]), expected[[0, 1, 2], [0, 1, 2]])
    torch.testing.assert_close(ens.member(1)(z), expected[1])


class RateAndMask(Rate):
    """Also answers with truth values."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        rate = super().forward(x)
        return rate, rate > 0


def test_truth_values_beside_answers_of_exp(tmp_path: Path) -> None:
    members = []
    for i in range(3):
        torch.manual_seed(30 + i)
        members.append(RateAndMask(6.0))
    path, x = built(tmp_path, lambda: RateAndMask(6.0), members, "x=float32[B,8]"), torch.randn(4, 8)
    assert bool(widepack.load(path)(x)[1].all())
