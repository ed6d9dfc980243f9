"""Tests calls of `route` that read the weights of each row's member: which models, which answers, swaps."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded import saved
from torch import Tensor, nn
from torch.nn import functional as F

from inference.small_networks import Normed, Plain, Shifted
from widepack.inference.routing.per_row import PerRowProgram
from widepack.inference.routing.routed_members import RowWeights


class Steps(nn.Module):
    """A linear layer over sequences, which has no form for rows of several members."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x.view(-1, 1, 6))
        return y


CASES: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "plain": (Plain, ["x=float32[B,6]"]),
    "normed": (Normed, ["x=float32[B,6]"]),
    "trunk": (Shifted, ["x=float32[B,6]", "offset=float32[8]"]),
}


@pytest.fixture
def stacked(monkeypatch: pytest.MonkeyPatch) -> list[RowWeights]:
    """Makes every call of several members take this form, and lists the stacked weights."""
    made: list[RowWeights] = []
    init = RowWeights.__init__

    def counted(self: RowWeights, *args: Any) -> None:
        init(self, *args)
        made.append(self)

    monkeypatch.setattr(RowWeights, "__init__", counted)
    monkeypatch.setattr(PerRowProgram, "is_faster", lambda *_: True)
    return made


def parts(value: Any) -> list[Tensor]:
    return list(value.values()) if isinstance(value, dict) else [value]


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("name", CASES)
def test_answers_by_rows(name: str, stacked: list[RowWeights], tmp_path: Path) -> None:
    make, specs = CASES[name]
    ens = saved(make, tmp_path, *specs, members=5)
    draw = random.Random(0)
    for batch in (2, 3, 16, 64):
        x, more = torch.randn(batch, 6), [torch.randn(8)] * (len(specs) - 1)
        ids = [draw.randrange(5) for _ in range(batch - 2)] + [4, 0]
        found = parts(ens.route(x, *more, member=ids))
        for row, i in enumerate(ids):
            for a, b in zip(found, parts(ens[i](x[row : row + 1], *more)), strict=True):
                torch.testing.assert_close(a[row], b[0], rtol=1e-5, atol=1e-5)
    assert len(stacked) == 1


def test_a_swap_replaces_the_stacked_weights_of_its_member(stacked: list[RowWeights], tmp_path: Path) -> None:
    ens = saved(Normed, tmp_path, "x=float32[B,6]")
    x, ids = torch.randn(6, 6), [2, 0, 2, 3, 0, 1]
    before = ens.route(x, member=ids)["y"]
    torch.manual_seed(50)
    new = Normed().eval()
    torch.save(new.state_dict(), tmp_path / "new.pt")
    ens.swap(2, tmp_path / "new.pt")
    found = ens.route(x, member=ids)["y"]
    torch.testing.assert_close(found[[0, 2]], new(x[[0, 2]])["y"])
    assert torch.equal(found[[1, 3, 4, 5]], before[[1, 3, 4, 5]])
    assert len(stacked) == 1


def test_models_without_this_form(stacked: list[RowWeights], tmp_path: Path) -> None:
    ens = saved(Steps, tmp_path, "x=float32[B,6]")
    x, ids = torch.randn(4, 6), [2, 0, 2, 3]
    found = ens.route(x, member=ids)
    for row, i in enumerate(ids):
        torch.testing.assert_close(found[row], ens[i](x[row : row + 1])[0])
    assert not stacked


class Promoted(nn.Module):
    """An op that reads an own weight beside a half: without dims it does not change the dtype."""

    def __init__(self, function: Callable[[Promoted, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.scale, self.norm = nn.Parameter(torch.randn(())), nn.LayerNorm(6)
        self.vector = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x.half())


PROMOTED: dict[str, Callable[[Promoted, Tensor], Tensor]] = {
    "scaled": lambda m, x: x * m.scale,
    "chosen": lambda m, x: torch.where(x > 0, x, m.scale),
    "angle": lambda m, x: torch.atan2(x, m.scale),
    "sign": lambda m, x: torch.copysign(x, m.scale),
    "after a norm": lambda m, x: F.layer_norm(x, (6,)) * m.scale,
    "in a norm": lambda m, x: F.layer_norm(x, (6,), m.norm.weight, m.norm.bias),
    "bfloat16": lambda m, x: x.bfloat16() * m.scale,
    "float64": lambda m, x: x.double() * m.scale,
    "whole numbers": lambda m, x: x.long() * m.scale,
    "a vector": lambda m, x: x * m.vector,
}


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("name", PROMOTED)
def test_the_dtype_is_that_of_the_member(name: str, stacked: list[RowWeights], tmp_path: Path) -> None:
    ens = saved(lambda: Promoted(PROMOTED[name]), tmp_path, "x=float32[B,6]")
    x, ids = torch.randn(4, 6), [2, 0, 2, 3]
    found = ens.route(x, member=ids)
    for row, i in enumerate(ids):
        alone = ens[i](x[row : row + 1])
        assert found.dtype == alone.dtype
        torch.testing.assert_close(found[row], alone[0], rtol=1e-2, atol=1e-2)


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_half_times_a_weight_without_dims(dtype: str, stacked: list[RowWeights], tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(()))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    ens = saved(Scaled, tmp_path, f"x={dtype}[B,6]")
    x = torch.randn(4, 6).to(getattr(torch, dtype))
    assert ens.route(x, member=[2, 0, 2, 3]).dtype == ens(x).dtype == x.dtype
    assert not stacked


def test_large_stacks_are_not_made(
    stacked: list[RowWeights], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("widepack.inference.routing.routed_members.MOST_BYTES", 100)
    ens = saved(Plain, tmp_path, "x=float32[B,6]")
    x, ids = torch.randn(4, 6), [2, 0, 2, 3]
    torch.testing.assert_close(ens.route(x, member=ids)[1], ens[0](x[1:2])[0])
    assert not stacked


def test_which_calls_take_this_form() -> None:
    form = PerRowProgram(lambda: None, [], {}, nodes=3, layers=2, numbers=16384)
    assert form.is_faster(32, 28) and form.is_faster(128, 71) and form.is_faster(8, 8)
    assert not form.is_faster(2, 2) and not form.is_faster(128, 2)
