"""Trains members whose forward takes a derivative through a norm over the batch, as members alone train."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fusing import same_gradients, stacked
from torch import Tensor, nn

from widepack import fuse

N = 2
NORMS: dict[str, Any] = {
    "batch norm": lambda: nn.BatchNorm1d(8),
    "momentum of none": lambda: nn.BatchNorm1d(8, momentum=None),
    "no statistics": lambda: nn.BatchNorm1d(8, affine=False, track_running_stats=False),
    "images": lambda: nn.Sequential(nn.Unflatten(1, (2, 2, 2)), nn.BatchNorm2d(2), nn.Flatten()),
    "instance norm": lambda: nn.Sequential(nn.Unflatten(1, (2, 4)), nn.InstanceNorm1d(2), nn.Flatten()),
}


class Force(nn.Module):
    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(6, 8), norm(), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_(True)
        energy = self.outer(self.norm(self.inner(x)).tanh()).sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("strategy", ["auto", "loop"])
@pytest.mark.parametrize("norm", NORMS)
def test_the_gradients_of_a_force_are_the_members(norm: str, strategy: str) -> None:
    torch.manual_seed(0)
    members = [Force(NORMS[norm]).double().train() for _ in range(N)]
    fused = fuse(members, torch.randn(8, 6).double(), strategy=strategy)
    for rows in (8, 5):
        x = torch.randn(rows, 6).double()
        answers = fused(x)
        answers.square().sum().backward()
        for i, member in enumerate(members):
            expected = member(x)
            torch.testing.assert_close(answers[i], expected)
            expected.square().sum().backward()
    same_gradients(fused, members)
    for name, value in stacked(members).items():
        torch.testing.assert_close(fused.state_dict()[name], value)
