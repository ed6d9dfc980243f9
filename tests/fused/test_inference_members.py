"""Tests that members whose weights were made in inference mode stay as they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import widepack

X = torch.randn(2, 2, 6, 6, generator=torch.Generator().manual_seed(5))


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4))


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU())


def made(make: Callable[[], nn.Module], training: bool) -> list[nn.Module]:
    with torch.inference_mode():
        return [make().train(training) for _ in range(2)]


def assigned(make: Callable[[], nn.Module], training: bool) -> list[nn.Module]:
    """Modules that got their weights in inference mode, and were made outside of it."""
    modules = [make().train(training) for _ in range(2)]
    with torch.inference_mode():
        for module in modules:
            module.load_state_dict(make().state_dict(), assign=True)
    return modules


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("members_of", [made, assigned])
@pytest.mark.parametrize("make", [linear, convolution])
def test_weights_made_in_inference_mode(
    make: Callable[[], nn.Module],
    members_of: Callable[[Callable[[], nn.Module], bool], list[nn.Module]],
    inside: bool,
    training: bool,
) -> None:
    modules = members_of(make, training)
    before = [{n: v.clone() for n, v in m.state_dict().items()} for m in modules]
    with torch.inference_mode(inside):
        fused = widepack.fuse(modules, X)
    for module, values in zip(modules, before):
        assert all(torch.equal(v, values[n]) for n, v in module.state_dict().items())
        assert all(v.is_inference() for v in module.parameters())
    with torch.inference_mode():
        expected = torch.stack([m.eval()(X) for m in modules])
    with torch.no_grad():
        torch.testing.assert_close(fused.eval()(X), expected.clone())
    fused.train()(X).square().sum().backward()
    assert all(p.grad is not None for p in fused.parameters())


class Reads(nn.Module):
    """A copy of it would read the weights of the original."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 4)
        self.kept = Shared(self.fc)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.kept.layer(x)
        return y


class Shared:
    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __deepcopy__(self, memo: object) -> Shared:
        return self


def test_copies_are_compared_also_without_gradients() -> None:
    with pytest.raises(widepack.UsageError, match="What the copy reads of the original: fc"):
        widepack.fuse(made(Reads, False), X)
