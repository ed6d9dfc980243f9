"""Tests `fuse(..., strategy="shared")`: dropout draws once for all members, in both modes."""

from __future__ import annotations

import copy

import pytest
import torch
from fusing import members
from torch import Tensor, nn

import widepack

P = 0.4


class Drops(nn.Module):
    """Returns 0 where dropout dropped a value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(4, 50), nn.Dropout(P)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.drop(self.linear(x))
        return y


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_members_drop_the_same_values_with_strategy_shared(train: bool) -> None:
    modules, x = members(Drops), torch.randn(8, 4)
    for member in modules:
        member.train(train)
    dropout = "off" if train else "on"
    together = widepack.fuse(modules, x, strategy="shared", dropout=dropout)
    apart = widepack.fuse(modules, x, dropout=dropout, validate=False)
    torch.manual_seed(0)
    with torch.no_grad():
        y, again, other = together(x), together(x), apart(x)
        kept = torch.stack([member.linear(x) for member in modules]) / (1 - P)
    gone = y == 0
    assert torch.equal(gone[0], gone[1]) and torch.equal(gone[1], gone[2])
    assert float(gone[0].double().mean()) == pytest.approx(P, abs=0.08)
    torch.testing.assert_close(y, torch.where(gone, 0, kept))
    assert not torch.equal(gone, again == 0)  # each call draws again
    assert not torch.equal(other[0] == 0, other[1] == 0)


def test_gradients_pass_where_nothing_was_dropped() -> None:
    modules, x = members(Drops), torch.randn(8, 4)
    fused = widepack.fuse([member.train() for member in modules], x, strategy="shared")
    y = fused(x)
    torch.autograd.backward(y.sum())
    passed = (y.detach()[0] != 0).float() / (1 - P)  # [B, O], the same for all
    for i in range(3):
        torch.testing.assert_close(fused.get_parameter("linear.bias").grad[i], passed.sum(0))  # type: ignore[index]
        torch.testing.assert_close(fused.get_parameter("linear.weight").grad[i], passed.T @ x)  # type: ignore[index]


def test_passes_of_one_model_are_equal_with_strategy_shared() -> None:
    model, x = members(Drops)[0], torch.randn(8, 4)
    with torch.no_grad():
        y = widepack.fuse(model, x, n=4, dropout="on", strategy="shared")(x)
    assert torch.equal(y, y[:1].expand_as(y)) and bool((y == 0).any())


def test_dropout_of_every_kind_is_off_in_comparisons() -> None:
    """The program is compared with the members without dropout, for each kind of dropout."""
    model = nn.Sequential(
        nn.Linear(4, 60),
        nn.Unflatten(1, (6, 10)),
        nn.Dropout1d(P),
        nn.FeatureAlphaDropout(P),
        nn.AlphaDropout(P),
        nn.Dropout(P),
        nn.Dropout(1.0),
    )
    modules = [copy.deepcopy(model).train() for _ in range(3)]
    x = torch.randn(8, 4)
    fused = widepack.fuse(modules, x, strategy="shared")
    assert not fused(x).any()  # the last dropout drops everything
