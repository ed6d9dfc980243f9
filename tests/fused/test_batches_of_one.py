"""Tests gradients of calls with one sample, also after a check with several: each member against itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fusing import copies, same_gradients
from torch import Tensor, nn

import widepack

N = 3


def norms_after(norm: Callable[[int], nn.Module]) -> nn.Module:
    """Returns two convolutions, each with a norm behind it whose gradient arrives in torch's own order."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        norm(6),
        nn.Tanh(),
        nn.Conv2d(6, 4, 3),
        norm(4),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 2),
    )


def image_of_one_channel() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 1, 3), nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(36, 2))


def norm_first() -> nn.Module:
    """Returns a norm that reads torch's own order, and whose gradient comes from a convolution."""
    return nn.Sequential(
        nn.BatchNorm2d(3), nn.Tanh(), nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 2)
    )


class OneImage(nn.Module):
    """A convolution over one image in every call: the mean over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 6, 3), nn.InstanceNorm2d(6), nn.Linear(216, 2)

    def forward(self, input: Tensor) -> Tensor:
        y = self.norm(self.conv(input.mean(0, keepdim=True))).tanh()
        return self.head(y.flatten(1)) + input.mean((1, 2, 3))[:, None]  # type: ignore[no-any-return]


def volumes() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 3)),
        nn.Conv3d(1, 4, (2, 3, 3)),
        nn.BatchNorm3d(4),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
        nn.Linear(4, 2),
    )


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: norms_after(nn.BatchNorm2d),
    "batch norm without statistics": lambda: norms_after(
        lambda c: nn.BatchNorm2d(c, track_running_stats=False)
    ),
    "group norm": lambda: norms_after(lambda c: nn.GroupNorm(2, c)),
    "instance norm": lambda: norms_after(lambda c: nn.InstanceNorm2d(c, affine=True)),
    "one channel": image_of_one_channel,
    "3d": volumes,
    "norm first": norm_first,
    "one image": OneImage,
}


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("first", [1, 4])
@pytest.mark.parametrize("members", [1, N])
@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_of_one_sample_are_those_of_each_member(
    name: str, members: int, first: int, training: bool
) -> None:
    nets = []
    for i in range(members):
        torch.manual_seed(i)
        nets.append(NETWORKS[name]().double().train(training))
    sample = torch.randn(first, 3, 8, 8, dtype=torch.float64)
    fused = widepack.fuse(nets, sample, dynamic={"input": {0: "B"}} if first > 1 else None).train(training)
    for batch in {1, first}:
        x = torch.randn(batch, 3, 8, 8, dtype=torch.float64, requires_grad=True)
        fused.zero_grad()
        torch.stack([y.square().mean() for y in fused(x)]).sum().backward()  # type: ignore[no-untyped-call]
        alone, y = copies(nets), x.detach().requires_grad_()
        torch.stack([net(y).square().mean() for net in alone]).sum().backward()  # type: ignore[no-untyped-call]
        same_gradients(fused, alone, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.extended
def test_a_requested_memory_order_is_not_for_one_sample() -> None:
    torch.manual_seed(0)
    nets = [norms_after(nn.BatchNorm2d).double() for _ in range(N)]
    fused = widepack.fuse(
        nets, torch.randn(4, 3, 8, 8, dtype=torch.float64), strategy=["wide", "grouped_channels_last"]
    )
    x = torch.randn(1, 3, 8, 8, dtype=torch.float64)
    torch.stack([y.square().mean() for y in fused(x)]).sum().backward()  # type: ignore[no-untyped-call]
    for net in nets:
        torch.autograd.backward(net(x).square().mean())
    same_gradients(fused, nets, rtol=1e-9, atol=1e-12)
