"""Tests group norms and batch norms of images whose mean is larger than their deviation.

Convolutions of all members give images in channels-last memory, where torch's own norms lose digits.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from loaded import built
from torch import Tensor, nn

import widepack

Make = Callable[[], nn.Module]


def extended(value: object) -> object:
    return pytest.param(value, marks=pytest.mark.extended)


def drawn(make: Make, seed: int, bias: float = 0.0, count: int = 4) -> list[nn.Module]:
    found = []
    for i in range(count):
        torch.manual_seed(100 * seed + i)
        module = make()
        with torch.no_grad():
            next(m for m in module.modules() if isinstance(m, nn.Conv2d)).bias.add_(bias)  # type: ignore[union-attr]
        found.append(module)
    return found


def within_bound(found: Tensor, members: list[nn.Module], inputs: list[Tensor]) -> None:
    """Asserts the stated bound: 2 times the members' own rms error and 4 times their largest."""
    with torch.no_grad():
        own = torch.stack([m(x) for m, x in zip(members, inputs)])
        exact = torch.stack([m.double()(x.double()) for m, x in zip(members, inputs)])
    for m in members:
        m.float()
    ulp = torch.finfo(torch.float32).eps * float(exact.square().mean().sqrt())
    mine, theirs = (own - exact).abs(), (found.detach() - exact).abs()
    assert float(theirs.square().mean().sqrt()) <= 2 * float(mine.square().mean().sqrt()) + ulp
    assert float(theirs.max()) <= 4 * float(mine.max()) + 4 * ulp


def offset_net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 1), nn.Conv2d(4, 8, 3), nn.GroupNorm(8, 8))


def grouped_net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 1), nn.Conv2d(4, 4, 3, groups=4), nn.GroupNorm(4, 4))


def two_norms() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(8, 16), nn.ReLU(), nn.Conv2d(16, 4, 1),
    )  # fmt: skip


@pytest.mark.parametrize("bias", [10.0, extended(4.0), extended(100.0)])
def test_a_build_opens_and_answers_within_the_bound(bias: float, tmp_path: Path) -> None:
    members = [m.eval() for m in drawn(offset_net, 1, bias)]
    ens = widepack.load(built(tmp_path, offset_net, members, sample=(torch.randn(4, 1, 8, 8),)))
    for batch in (1, 2, 4, 16):
        x = torch.randn(4, batch, 1, 8, 8)
        within_bound(ens.each(x), members, list(x))
        within_bound(ens(x[0]), members, [x[0]] * 4)


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("seed", [0, 2, *map(extended, (1, 3, 4, 5, 6, 7))])
def test_fuse_takes_members_with_default_initialisation(seed: int) -> None:
    members = [m.eval() for m in drawn(grouped_net, seed)]
    x = torch.randn(4, 1, 8, 8)
    fused = widepack.fuse(members, x)
    within_bound(fused(x), members, [x] * 4)


@pytest.mark.extended
@pytest.mark.parametrize("batch", [2, extended(3), extended(4)])
@pytest.mark.parametrize("strategy", ["auto", extended("loop"), extended("wide")])
def test_images_of_positive_numbers(batch: int, strategy: str) -> None:
    members = [m.eval() for m in drawn(two_norms, batch)]
    x = torch.rand(batch, 3, 12, 12, generator=torch.Generator().manual_seed(batch))
    fused = widepack.fuse(members, x, strategy=strategy, validate=False)
    with torch.no_grad():
        within_bound(fused(x), members, [x] * 4)


@pytest.mark.parametrize(
    "norm",
    [lambda: nn.GroupNorm(4, 8), extended(lambda: nn.BatchNorm2d(8)), extended(lambda: nn.InstanceNorm2d(8))],
)
def test_members_that_train(norm: Make) -> None:
    def make() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 8, 3), norm(), nn.ReLU(), nn.Conv2d(8, 8, 3), norm(), nn.Conv2d(8, 4, 1)
        )

    members = [m.train() for m in drawn(make, 3, 10.0)]
    x = torch.rand(8, 3, 10, 10)
    fused = widepack.fuse(members, x)
    fused.train()
    found = fused(x)
    within_bound(found, members, [x] * 4)


@pytest.mark.extended
def test_an_owner_who_keeps_images_in_channels_last_memory(tmp_path: Path) -> None:
    """The member as its owner runs it has the larger error. It is no wrong capture."""

    def make() -> nn.Module:
        return offset_net().to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

    members = [m.eval() for m in drawn(make, 2, 10.0)]
    built(tmp_path, make, members, sample=(torch.randn(4, 1, 8, 8),))
