"""Tests the decompositions of backward passes against torch, and members that have them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_builds import agree, loaded, member
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from widepack import CaptureError, fuse
from widepack.capture.patches.decompositions import backward_table

N = 3
Op = Callable[[Tensor], Tensor]
WEIGHT = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
BIAS = torch.ones(4, dtype=torch.float64, requires_grad=True)


def conv(x: Tensor, **options: Any) -> Tensor:
    return F.conv1d(x, WEIGHT, BIAS, groups=2, **options)


def conv_transpose(x: Tensor, **options: Any) -> Tensor:
    return F.conv_transpose1d(x, WEIGHT, BIAS, groups=2, **options)


def resized(mode: str, align: bool | None = None, **options: Any) -> Op:
    return lambda x: F.interpolate(x, mode=mode, align_corners=align, **options)


def some_equal(p: float, x: Tensor) -> Tensor:
    """Distances of which some are 0."""
    return torch.cdist(x, torch.cat([x + 1, x[:, :2]], 1), p)


OPS: dict[str, tuple[Op, tuple[int, ...]]] = {
    **{
        f"conv {s}{p}{d}{n}": (partial(conv, stride=s, padding=p, dilation=d), (2, 4, n))
        for s, p, d, n in ((1, 0, 1, 9), (2, 1, 1, 8), (2, 1, 1, 9), (3, 2, 2, 10), (3, 0, 1, 11))
    },
    "conv transposed": (conv_transpose, (2, 4, 7)),
    "conv transposed strided": (
        lambda x: conv_transpose(x, stride=3, padding=1, output_padding=2),
        (2, 4, 7),
    ),
    "conv2d": (lambda x: F.conv2d(x, WEIGHT[:, :, None], stride=2, padding=(0, 1), groups=2), (2, 4, 5, 8)),
    "conv3d": (lambda x: F.conv3d(x, WEIGHT[:, :, None, None], groups=2, stride=2), (1, 4, 3, 5, 7)),
    "avg_pool1d": (lambda x: F.avg_pool1d(x, 3, 2, 1), (2, 3, 8)),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), (2, 3, 6, 7)),
    "avg_pool2d unbatched": (lambda x: F.avg_pool2d(x, 2), (3, 6, 7)),
    "avg_pool2d ceil": (lambda x: F.avg_pool2d(x, (3, 2), (2, 3), (1, 0), ceil_mode=True), (2, 3, 6, 7)),
    "avg_pool2d valid": (lambda x: F.avg_pool2d(x, 3, 2, 1, True, count_include_pad=False), (2, 3, 6, 7)),
    "avg_pool2d divisor": (lambda x: F.avg_pool2d(x, 3, 2, 1, divisor_override=5), (2, 3, 6, 7)),
    "avg_pool3d": (lambda x: F.avg_pool3d(x, 2, 1, 1), (2, 3, 4, 5, 3)),
    "adaptive_avg_pool1d": (lambda x: F.adaptive_avg_pool1d(x, 3), (2, 3, 7)),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, (3, 5)), (2, 3, 7, 8)),
    "adaptive_avg_pool3d": (lambda x: F.adaptive_avg_pool3d(x, (2, 3, 2)), (2, 3, 4, 5, 3)),
    "adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x, 3), (2, 3, 7, 8)),
    "adaptive_max_pool3d": (lambda x: F.adaptive_max_pool3d(x, 2), (2, 3, 4, 5, 3)),
    "max_pool3d": (lambda x: F.max_pool3d(x, 2, 1), (2, 3, 4, 5, 3)),
    "nearest1d": (resized("nearest", size=7), (2, 3, 4)),
    "nearest2d": (resized("nearest", scale_factor=(2, 1.5)), (2, 3, 4, 5)),
    "nearest3d": (resized("nearest", size=(3, 4, 5)), (1, 2, 2, 3, 3)),
    "nearest-exact1d": (resized("nearest-exact", scale_factor=1.5), (2, 3, 5)),
    "nearest-exact3d": (resized("nearest-exact", size=(3, 4, 5)), (1, 2, 2, 3, 3)),
    "nearest-exact2d": (resized("nearest-exact", size=(7, 3)), (2, 3, 4, 5)),
    "linear": (resized("linear", False, size=7), (2, 3, 4)),
    "bilinear": (resized("bilinear", False, scale_factor=2), (2, 3, 4, 5)),
    "bilinear corners": (resized("bilinear", True, size=(7, 3)), (2, 3, 4, 5)),
    "trilinear": (resized("trilinear", False, size=(3, 4, 5)), (1, 2, 2, 3, 3)),
    "bicubic": (resized("bicubic", False, scale_factor=(2, 1.5)), (2, 3, 4, 5)),
    "replicate1d": (lambda x: F.pad(x, (1, 3), mode="replicate"), (2, 3, 4)),
    "replicate2d": (lambda x: F.pad(x, (1, 3, 0, 2), mode="replicate"), (2, 3, 4, 5)),
    "replicate3d": (lambda x: F.pad(x, (1, 3, 0, 2, 1, 0), mode="replicate"), (2, 3, 4, 5, 3)),
    **{
        f"cdist {p}": (partial(some_equal, p), (2, 5, 3))
        for p in (0.0, 0.7, 1.0, 1.5, 2.0, 3.0, float("inf"))
    },
    "cdist broadcast": (lambda x: torch.cdist(x[:, None], x[None], 2.0), (2, 5, 3)),
    **{f"pdist {p}": (partial(F.pdist, p=p), (5, 3)) for p in (1.0, 2.0, 3.0, float("inf"))},
    "pdist of one row": (F.pdist, (1, 3)),
    "pdist of equal rows": (lambda x: F.pdist(torch.cat([x, x])), (3, 2)),
    "hardshrink": (F.hardshrink, (4, 9)),
    "softshrink": (F.softshrink, (4, 9)),
}


class Decomposed(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class has no types
    """Runs the decompositions in place of the ops, and notes which ones."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.table, self.met = backward_table(), set[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self.table:
            return func(*args, **(kwargs or {}))
        self.met.add(func)
        return self.table[func](*args, **(kwargs or {}))


def test_decompositions_are_the_backward_passes_of_torch() -> None:
    met = set()
    for name, (op, shape) in OPS.items():
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        y = op(x)
        given = x, *([BIAS] if name.startswith("conv ") else [])
        weights = torch.randn_like(y)
        theirs = torch.autograd.grad(y, given, weights, retain_graph=True)
        with Decomposed() as mode:
            ours = torch.autograd.grad(y, given, weights)
        assert len(mode.met) == 1, name
        met |= mode.met
        for a, b in zip(ours, theirs):
            assert a.is_contiguous() or not b.is_contiguous(), name
            assert torch.allclose(a, b), name
    assert met == set(backward_table())


@pytest.mark.parametrize("transposed", [False, True])
def test_derivatives_of_convolutions_by_weights(transposed: bool) -> None:
    op = F.conv_transpose2d if transposed else F.conv2d
    for stride, padding, dilation in ((1, 0, 1), (2, 1, 1), (1, 2, 2), (3, 1, 2)):
        x = torch.randn(2, 4, 9, 8, dtype=torch.float64, requires_grad=True)
        weight = torch.randn((4, 5, 3, 2) if transposed else (5, 4, 3, 2), dtype=torch.float64)
        y = op(x, weight.requires_grad_(True), stride=stride, padding=padding, dilation=dilation)
        weights = torch.randn_like(y)
        theirs = torch.autograd.grad(y, (x, weight), weights, retain_graph=True)
        with Decomposed() as mode:
            ours = torch.autograd.grad(y, (x, weight), weights)
        assert mode.met
        for a, b in zip(ours, theirs):
            torch.testing.assert_close(a, b)


class Net(nn.Module):
    """The derivative of a small network by its input. layer: its first layer. op: what follows."""

    def __init__(self, layer: Callable[[], nn.Module], op: Op) -> None:
        super().__init__()
        self.layer = layer()
        self.scale = nn.Parameter(torch.rand(()) + 0.5)
        self.op = op

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_(True)
        y = (self.op(self.layer(x)) * self.scale).sin().sum()
        (found,) = torch.autograd.grad(y, x, create_graph=self.training)
        return found


def centers(x: Tensor) -> Tensor:
    """Distances to points that depend on the input, with equal points among them."""
    return torch.cdist(x, torch.cat([x.sin() + 2, x], 1))


NETS: dict[str, tuple[Callable[[], nn.Module], Op, str, list[tuple[int, ...]]]] = {
    "conv1d": (
        lambda: nn.Conv1d(3, 4, 3, padding=1),
        torch.tanh,
        "B,3,T",
        [(2, 3, 9), (1, 3, 6), (5, 3, 12)],
    ),
    "conv2d": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.SiLU(), nn.Conv2d(4, 4, 3)),
        lambda x: F.adaptive_avg_pool2d(x, 2),
        "B,3,9,12",
        [(2, 3, 9, 12), (1, 3, 9, 12), (5, 3, 9, 12)],
    ),
    "conv2d dynamic": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.SiLU(), nn.Conv2d(4, 4, 3)),
        lambda x: F.adaptive_avg_pool2d(x, 2),
        "B,3,H,W",
        [(2, 3, 9, 12), (1, 3, 16, 11), (5, 3, 13, 14)],
    ),
    "conv_transpose2d": (
        lambda: nn.ConvTranspose2d(3, 4, 3, 2, 1, 1),
        torch.tanh,
        "B,3,H,W",
        [(2, 3, 5, 6), (1, 3, 7, 4)],
    ),
    "avg_pool2d": (lambda: nn.AvgPool2d(3, 2, 1), torch.tanh, "B,3,H,W", [(2, 3, 6, 7), (1, 3, 9, 8)]),
    "bilinear": (nn.Identity, resized("bilinear", scale_factor=2), "B,3,H,W", [(2, 3, 6, 7), (1, 3, 9, 8)]),
    "cdist": (lambda: nn.Linear(3, 4), centers, "B,A,3", [(2, 5, 3), (1, 9, 3), (4, 20, 3)]),
    "pdist": (lambda: nn.Linear(3, 4), F.pdist, "A,3", [(5, 3), (3, 3), (9, 3)]),
}


class Adapted(nn.Module):
    """Takes a step of gradient descent in forward, by the weights of a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        def loss(weights: dict[str, Tensor]) -> Tensor:
            y: Tensor = torch.func.functional_call(self.layer, weights, x)
            return y.tanh().square().mean((2, 3)).sum()

        weights: dict[str, Tensor] = dict(self.layer.named_parameters())
        slopes: Any = torch.func.grad(loss)(weights)
        y: Tensor = torch.func.functional_call(self.layer, {n: w - slopes[n] for n, w in weights.items()}, x)
        return y


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("name", [*NETS, "weights"])
def test_members_answer_for_every_size(name: str, tmp_path: Path) -> None:
    if name == "weights":
        make: Callable[[], nn.Module] = Adapted
        sizes, shapes = "B,3,H,W", list[tuple[int, ...]]([(2, 3, 8, 9), (1, 3, 7, 7), (5, 3, 10, 12)])
    else:
        layer, op, sizes, shapes = NETS[name]
        make = partial(Net, layer, op)
    ens = loaded(make, tmp_path, f"x=float32[{sizes}]", count=N, budget=0)
    for shape in shapes:
        agree(ens, make, torch.randn(shape), rtol=2e-5, atol=2e-5)


@pytest.mark.extended
@pytest.mark.parametrize("name", ["conv1d", "conv2d", "conv_transpose2d", "avg_pool2d", "bilinear"])
def test_members_train_by_a_derivative(name: str) -> None:
    """Gradients flow through the backward passes. The weights' gradients are the members' own."""
    layer, op, _, shapes = NETS[name]
    nets = [member(partial(Net, layer, op), i).double().train() for i in range(N)]
    x = torch.randn(shapes[0], dtype=torch.float64)
    fused = fuse(nets, (x,)).train()
    fused(x.clone()).square().sum().backward()
    found = dict(fused.named_parameters())
    for i, net in enumerate(nets):
        net(x.clone()).square().sum().backward()
        for key, value in net.named_parameters():
            ours, theirs = found[key].grad, value.grad
            assert (ours is None or not ours[i].any()) if theirs is None else ours is not None
            if theirs is not None and ours is not None:
                torch.testing.assert_close(ours[i], theirs)


def test_a_backward_pass_without_a_form_is_refused() -> None:
    def sampled(x: Tensor) -> Tensor:
        return F.grid_sample(x, x[:, :2].permute(0, 2, 3, 1).tanh(), align_corners=False)

    nets = [Net(nn.Identity, sampled).eval() for _ in range(N)]
    with pytest.raises(CaptureError, match="derivative through grid_sampler_2d.*test_backward_passes.py"):
        fuse(nets, (torch.randn(2, 3, 5, 5),))
