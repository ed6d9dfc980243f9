"""Tests of members whose weights have NaN or inf: the artifact is written, and the member is named."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded import files_of, seeded
from small_builds import QUICK
from torch import Tensor, nn

import widepack
from widepack import VerificationError
from widepack.verification import reference
from widepack.verification.tolerance import measure, with_same_places


def make() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1))


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("value", ["inf", "nan"])
def test_one_number_of_a_convolution(tmp_path: Path, value: str) -> None:
    """Kernels multiply it with padding, or spread it over tiles: each one to other places."""
    torch.manual_seed(0)
    models = [make() for _ in range(3)]
    with torch.no_grad():
        models[1][0].weight[1, 1, 0, 1] = float(value)  # type: ignore[index]
    files, out = files_of(tmp_path, models), tmp_path / "ens.wide"
    report = widepack.build(files, out=out, model=make, inputs="input=float32[B,3,16,16]", **QUICK)
    assert [(row["member"], row["places"]) for row in report.not_finite] == [("m1", "any")]

    ens = widepack.load(out)
    x = torch.randn(5, 3, 16, 16)
    for answers in (ens(x), ens.each(x.expand(3, *x.shape))):
        assert not torch.isfinite(answers[1]).all()
        for i in (0, 2):
            torch.testing.assert_close(answers[i], models[i](x).detach())


def test_only_places_of_the_answers_that_are_named_are_free() -> None:
    inf, nan = float("inf"), float("nan")
    own, wide = torch.tensor([1.0, inf, nan, 4.0]), torch.tensor([nan, 2.0, nan, 4.0])
    a, b = with_same_places(wide, own)
    assert torch.isnan(a).tolist() == torch.isnan(b).tolist() == [True, True, True, False]
    assert measure("m", "B=1", a, b, own.double()).words == ""
    assert measure("m", "B=1", wide, own, own.double()).words.startswith("NaN or inf in other places")
    finite = torch.zeros(4)
    assert with_same_places(finite, own) == (finite, own)  # the wide program lost NaN
    wrong = with_same_places(torch.tensor([nan, 2.0, nan, 5.0]), own)
    assert measure("m", "B=1", *wrong, own.double()).largest == 1.0


class Large(nn.Module):
    """Its answers to inputs above 2 leave float32 where the scale is 1.7e38. The weights are finite."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("wrong", [False, True])
def test_only_calls_whose_own_answers_overflow_are_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: bool
) -> None:
    answers_of, changed = reference.WideRun.answers, []

    def answers(*args: Any) -> Iterator[Any]:
        for call, i, outputs in answers_of(*args):
            y = outputs[0]
            if i == 1 and bool(torch.isfinite(y).all()) == wrong:
                changed.append(call)
                outputs = [y.index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(float("nan")))]
            yield call, i, outputs

    files = files_of(tmp_path, [{"scale": torch.tensor(scale)} for scale in (1.0, 1.7e38)])
    monkeypatch.setattr(reference.WideRun, "answers", answers)

    def build() -> Any:
        out = tmp_path / "ens.wide"
        return widepack.build(files, out=out, model=Large, inputs="x=float32[B,8]", **QUICK)

    if wrong:
        with pytest.raises(VerificationError, match="NaN or inf in other places"):
            build()
    else:
        assert [(row["member"], row["places"]) for row in build().not_finite] == [("m1", "any")]
    assert changed


class AlwaysOverflows(nn.Module):
    """Its last number leaves float32 in every call if `s` is 100, and not float64."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.s = nn.Linear(4, 3), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.a(x), torch.exp(self.s) + 0 * x[:, :1]], 1)


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("wrong", [False, True])
def test_a_member_that_overflows_in_every_call_is_compared(
    wrong: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = [seeded(AlwaysOverflows, i) for i in range(3)]
    for i, module in enumerate(members):
        module.s.data.fill_(100.0 if i == 1 else 1.0)
    paths = files_of(tmp_path, members)
    right = reference.WideRun.answers

    def answers(*args: Any) -> Iterator[tuple[int, int, list[Tensor]]]:
        for call, i, found in right(*args):
            yield call, i, [y * math.nan for y in found] if wrong and i == 1 else found

    monkeypatch.setattr(reference.WideRun, "answers", answers)
    with pytest.raises(VerificationError, match="member m1") if wrong else contextlib.nullcontext():
        widepack.build(
            paths, tmp_path / "e.wide", model=AlwaysOverflows, sample=(torch.randn(4, 4),), **QUICK
        )
