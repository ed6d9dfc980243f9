"""Tests that fused modules are captured without `torch.autocast` and follow it as members do."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fusing import First, draw, members
from torch import nn

import widepack

NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "norm": (lambda: nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3)), (6, 4)),
    "images": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        ),
        (6, 2, 6, 6),
    ),
    "steps": (lambda: nn.Sequential(nn.LSTM(4, 5, batch_first=True), First()), (6, 3, 4)),
}


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(("train", "gradients"), list(itertools.product([False, True], repeat=2)))
def test_calls_inside_and_outside_of_autocast_answer_as_the_members(
    name: str, train: bool, gradients: bool
) -> None:
    """The first call of one pattern is inside autocast, the first call of the other is outside."""
    make, shape = NETWORKS[name]
    modules, x = [m.train(train) for m in members(make)], draw(*shape)
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
