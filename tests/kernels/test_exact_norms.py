"""Tests that normalizations of images in channels-last memory lose no more digits than of contiguous ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from widepack.ir import ops
from widepack.kernels.exact_norms import as_torch_computes

OPS: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Any, ...]]] = {
    "group_norm.default": lambda x, w, b: (x, 4, w, b),
    "native_group_norm.default": lambda x, w, b: (x, w, b, len(x), x.shape[1], x[0, 0].numel(), 4, 1e-5),
    "_native_batch_norm_legit.no_stats": lambda x, w, b: (x, w, b, True, 0.1, 1e-5),
    "_native_batch_norm_legit_functional.default": lambda x, w, b: (
        x,
        w,
        b,
        b.detach(),
        w.detach(),
        True,
        0.1,
        1e-5,
    ),
    "instance_norm.default": lambda x, w, b: (x, w, b, None, None, True, 0.1, 1e-5, False),
    "_native_batch_norm_legit_no_training.default": lambda x, w, b: (x, w, b, b + x.mean(), w + 1, 0.1, 1e-5),
    "var_mean.correction": lambda x, w, b: (x, [0, 2, 3]),
    "layer_norm.default": lambda x, w, b: (x, [x.shape[-1]]),
}
SHAPES = [(2, 8, 9, 7), (3, 16, 1, 40), (2, 8, 3, 5, 4), (4, 64, 1, 1)]


def drawn(shape: tuple[int, ...], offset: float) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(len(shape))
    return (
        torch.randn(shape, generator=g) + offset,
        torch.rand(shape[1], generator=g) + 0.5,
        torch.rand(shape[1], generator=g),
    )


def last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


def run(op: str, *given: Tensor) -> list[Tensor]:
    found = ops.function(f"aten.{op}")(*OPS[op](*given))
    return [y for y in ([found] if isinstance(found, Tensor) else found) if y.numel()]


def error(a: Tensor, exact: Tensor) -> tuple[float, float]:
    difference = (a.detach().double() - exact.detach()).abs()
    return float(difference.square().mean().sqrt()), float(difference.max())


@pytest.mark.parametrize("offset", [0.0, 3.0, 10.0, 100.0, 1000.0])
@pytest.mark.parametrize("op", OPS)
def test_channels_last_is_as_exact_as_contiguous(op: str, offset: float) -> None:
    for shape in SHAPES[: 3 if offset else 4]:
        x, w, b = drawn(shape, offset)
        exact = run(op, x.double(), w.double(), b.double())
        for k, (own, wide, y) in enumerate(zip(run(op, x, w, b), run(op, last(x), w, b), exact)):
            scale = float(y.detach().square().mean().sqrt()) * torch.finfo(x.dtype).eps
            rms, largest = error(own, y)
            assert wide.dtype == own.dtype and wide.shape == own.shape
            assert error(wide, y)[0] <= 2 * rms + scale, (shape, k, error(wide, y), rms)
            assert error(wide, y)[1] <= 4 * largest + 4 * scale, (shape, k)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", list(OPS)[:4])
def test_numbers_of_16_bits(op: str, dtype: torch.dtype) -> None:
    for offset in (0.0, 3.0, 100.0):
        x, w, b = (t.to(dtype) for t in drawn(SHAPES[0], offset))
        exact = run(op, x.double(), w.double(), b.double())
        for own, wide, y in zip(run(op, x, w, b), run(op, last(x), w, b), exact):
            assert wide.dtype == own.dtype
            scale = float(y.detach().square().mean().sqrt()) * torch.finfo(own.dtype).eps
            assert error(wide, y)[0] <= 2 * error(own, y)[0] + scale


@pytest.mark.parametrize("op", list(OPS)[:5])
@pytest.mark.parametrize("offset", [0.0, 10.0, 100.0])
def test_derivatives_of_both_orders(op: str, offset: float) -> None:
    """The mean that is taken off counts as a constant: the derivatives are those of the op."""

    def derivatives(*values: Tensor) -> list[Tensor]:
        given = [v.detach().requires_grad_() for v in values]
        y = run(op, *given)[0]
        g = torch.Generator().manual_seed(5)
        weights = torch.randn(y.shape, generator=g, dtype=torch.float64).to(y.dtype)
        first = torch.autograd.grad((y * y * weights).sum(), given, create_graph=True)
        second = torch.autograd.grad(first[0].square().sum(), given[0])
        return [*first, *second]

    x, w, b = drawn(SHAPES[0], offset)
    exact = derivatives(x.double(), w.double(), b.double())
    for own, wide, y in zip(derivatives(x, w, b), derivatives(last(x), w, b), exact):
        scale = float(y.detach().square().mean().sqrt()) * torch.finfo(x.dtype).eps
        assert error(wide, y)[0] <= 2 * error(own, y)[0] + 20 * scale


def test_torchs_own_kernels_are_less_exact_there() -> None:
    """If this fails, torch's kernels take two passes now, and the replacements can go."""
    x, w, b = drawn(SHAPES[0], 100.0)
    exact = run("group_norm.default", x.double(), w.double(), b.double())[0]
    with as_torch_computes():
        torchs = run("group_norm.default", last(x), w, b)[0]
    assert torch.equal(torchs, torch.group_norm(last(x), 4, w, b))
    assert error(torchs, exact)[0] > 20 * error(run("group_norm.default", x, w, b)[0], exact)[0]


def test_numbers_that_are_not_finite_stay_in_their_group() -> None:
    x, w, b = drawn(SHAPES[0], 1.0)
    x[0, 3, 2, 2], x[1, 7, 0, 0] = float("nan"), float("inf")
    for op in list(OPS)[:3]:
        own, wide = run(op, x, w, b)[0], run(op, last(x), w, b)[0]
        assert torch.equal(own.isfinite(), wide.isfinite())


@pytest.mark.parametrize("offset", [0.0, 100.0])
@pytest.mark.parametrize("shape", [(4, 64, 1, 1), (4, 16, 1, 1, 1)])
@pytest.mark.parametrize("op", list(OPS)[:4])
def test_images_of_one_pixel_with_strides_of_channels_last(
    op: str, shape: tuple[int, ...], offset: float
) -> None:
    """A packed convolution gives such images, which are contiguous, too."""
    x, w, b = drawn(shape, offset)
    channels, *pixels = shape[1:]
    strided = torch.empty([shape[0], *pixels, channels]).movedim(-1, 1).copy_(x)
    assert strided.is_contiguous() and strided.stride() != x.stride()
    for own, wide in zip(run(op, x, w, b), run(op, strided, w, b)):
        assert torch.equal(own, wide)
