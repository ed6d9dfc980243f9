"""Tests that fused modules are captured without `torch.autocast` and follow it as members do."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from fusing import draw, members
from torch import Tensor, nn

import widepack


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 8)
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.norm(self.fc(x)))
        return y


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.conv(x)).relu().mean((2, 3))
        return y


class Steps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 5, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.rnn(x)[0]


INPUTS = {Norm: (6, 4), Images: (6, 2, 6, 6), Steps: (6, 3, 4)}


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("make", list(INPUTS))
@pytest.mark.parametrize(("train", "gradients"), list(itertools.product([False, True], repeat=2)))
def test_calls_inside_and_outside_of_autocast_answer_as_the_members(
    make: Any, train: bool, gradients: bool
) -> None:
    """The first call of one pattern is inside autocast, the first call of the other is outside."""
    modules = [m.train(train) for m in members(make)]
    x = draw(*INPUTS[make])
    xs = torch.stack([x, x + 1, x - 1])
    with autocast(True):
        fused = widepack.fuse(modules, x)
    for inside, each in [(True, True), (False, True), (False, False), (True, False), (True, True)]:
        with torch.set_grad_enabled(gradients), autocast(inside):
            y = fused.each(xs) if each else fused(x)
            right = torch.stack([m(xs[i] if each else x) for i, m in enumerate(modules)])
        bound = 3e-2 if inside else 1e-5
        torch.testing.assert_close(y.float(), right.float(), rtol=bound, atol=bound)
        assert y.dtype == right.dtype or (inside and y.dtype == torch.float32)  # limits.md describes this
        if train and gradients:
            y.float().square().sum().backward()


def autocast(enabled: bool) -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled)
