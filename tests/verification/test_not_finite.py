"""Tests of members whose weights have NaN or inf: the artifact is written, and the member is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import widepack
from widepack.verification.tolerance import measure, with_same_places


def make() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1))


@pytest.mark.parametrize("value", ["inf", "nan"])
def test_one_number_of_a_convolution(tmp_path: Path, value: str) -> None:
    """Kernels multiply it with padding, or spread it over tiles: each one to other places."""
    torch.manual_seed(0)
    models = [make() for _ in range(3)]
    with torch.no_grad():
        models[1][0].weight[1, 1, 0, 1] = float(value)  # type: ignore[index]
    for i, m in enumerate(models):
        torch.save(m.state_dict(), tmp_path / f"m{i}.pt")
    out = tmp_path / "ens.wide"
    files = sorted(tmp_path.glob("*.pt"))
    report = widepack.build(files, out=out, model=make, inputs="input=float32[B,3,16,16]", pt2=False)
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
