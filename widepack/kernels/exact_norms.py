"""Computes normalizations of images in channels-last memory as exactly as torch does in contiguous memory.

torch's kernels for channels-last images on a CPU take the variance of a group as `mean(x^2) - mean(x)^2`, and
add the numbers of a channel one after the other in float32. Both lose digits, the first without limit where
the mean is larger than the deviation. A wide program has images in this order where the member has them
contiguous. So the mean, which torch's own sums give exactly, is taken off first: normalization is the same
for `x - mean`, and so are its derivatives, in which the mean counts as a constant.

A function has the parameters of the op that it replaces. Other memory, devices and compilers, which have
formulas of their own, get torch's op. `as_torch_computes` gives it to all, for members as their owners run
them.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

_SWITCH = threading.local()
_HALVES = (torch.bfloat16, torch.float16)


@contextlib.contextmanager
def as_torch_computes() -> Iterator[None]:
    """Runs torch's own kernels in this thread, also for images in channels-last memory."""
    before = getattr(_SWITCH, "off", False)
    _SWITCH.off = True
    try:
        yield
    finally:
        _SWITCH.off = before


def _steps_by_channels(x: Tensor) -> bool:
    """Returns whether the strides of an image of the CPU say that its channels are innermost.

    Strides that a compiler traces as symbols are not compared.
    """
    if x.dim() < 4 or x.device.type != "cpu" or not x.is_floating_point() or x.numel() == 0:
        return False
    innermost = x.stride(1)
    if type(innermost) is not int or innermost != 1:
        return False
    return not (torch.compiler.is_dynamo_compiling() or getattr(_SWITCH, "off", False))


def _is_channels_last(x: Tensor) -> bool:
    """Returns whether an image of the CPU has its channels innermost in memory."""
    return _steps_by_channels(x) and x.shape[1] > 1 and not x.is_contiguous()


def _with_own_strides(x: Tensor) -> Tensor:
    """Returns an image, with the strides of contiguous memory if it is contiguous.

    Images of one pixel or of one channel are the same memory in both orders. torch chooses by their strides.
    """
    return x.flatten().view(x.shape) if _steps_by_channels(x) and x.is_contiguous() else x


def _group_means(x: Tensor, groups: int) -> Tensor:
    """Returns the mean of each group `[B, groups]` of images `[B, C, *]` in channels-last memory."""
    rows = x.detach().movedim(1, -1).flatten(1, -2)  # [B, *, C], in the order of memory
    return rows.mean(1).reshape(x.shape[0], groups, -1).mean(-1)


def _on_channels(values: Tensor, x: Tensor) -> Tensor:
    """Returns values of groups `[B, groups]` as `[B, C, 1, ...]` for images `[B, C, *]`."""
    each = values.unsqueeze(-1).expand(-1, -1, x.shape[1] // values.shape[1]).flatten(1)
    return each.reshape(*each.shape, *(1 for _ in x.shape[2:]))


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-05,
    cudnn_enabled: bool = True,
) -> Tensor:
    """Computes `aten.group_norm`."""
    if not _is_channels_last(input):
        image = _with_own_strides(input)
        y: Tensor = torch.ops.aten.group_norm.default(image, num_groups, weight, bias, eps, cudnn_enabled)
        return y
    x, scale, shift = (_single(t) for t in (input, weight, bias))
    assert x is not None
    x = x - _on_channels(_group_means(x, num_groups), x)
    y = torch.ops.aten.group_norm.default(x, num_groups, scale, shift, eps, cudnn_enabled)
    return y.to(input.dtype)


def _single(x: Tensor | None) -> Tensor | None:
    """Returns numbers of 16 bits in float32: they have too few digits for a difference from a mean."""
    return x.float() if x is not None and x.dtype in _HALVES else x


def _image_for_torch(input: Tensor, training: bool) -> Tensor | None:
    """Returns the image that torch's kernel of batch normalization normalizes exactly; None if none does."""
    if not training or not _is_channels_last(input):
        return _with_own_strides(input) if training else input
    return input.contiguous() if input.dtype in _HALVES else None


def native_group_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    N: int,  # the schema's names
    C: int,
    HxW: int,
    group: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `aten.native_group_norm`, whose kernel takes images that are dense in one of two orders."""
    # the kernel reads parameters as if their stride were 1
    weight, bias = (None if x is None else x.contiguous() for x in (weight, bias))
    means, image = None, _image_for_torch(input, training=True)
    if image is None:
        means = _group_means(input, group)
        image = input - _on_channels(means, input)
    op = torch.ops.aten.native_group_norm.default
    y, mean, rstd = op(image, weight, bias, N, C, HxW, group, eps)
    return y, mean if means is None else mean + means, rstd


def batch_norm_functional(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Computes `aten._native_batch_norm_legit_functional`."""
    if (image := _image_for_torch(input, training)) is not None:
        op = torch.ops.aten._native_batch_norm_legit_functional.default
        results: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = op(
            image, weight, bias, running_mean, running_var, training, momentum, eps
        )
        return results
    y, mean, rstd, variance = _batch_norm(input, weight, bias, momentum, eps)
    rows = input.numel() // input.shape[1]
    unbiased = variance * (rows / (rows - 1) if rows > 1 else math.nan)
    return (
        y,
        mean,
        rstd,
        running_mean * (1 - momentum) + mean * momentum,
        running_var * (1 - momentum) + unbiased * momentum,
    )


def batch_norm_of_batch(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `aten._native_batch_norm_legit.no_stats`."""
    if (image := _image_for_torch(input, training)) is not None:
        op = torch.ops.aten._native_batch_norm_legit.no_stats
        results: tuple[Tensor, Tensor, Tensor] = op(image, weight, bias, training, momentum, eps)
        return results
    return _batch_norm(input, weight, bias, momentum, eps)[:3]


def _batch_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the answer, the mean, the reciprocal deviation and the variance of each channel.

    torch's kernel adds the squares one after the other. Its deviation is replaced by that of exact sums.
    """
    mean = _rows(input).mean(0)
    centered = input - _per_channel(mean, input)
    op = torch.ops.aten._native_batch_norm_legit.no_stats
    y, rest, rounded = op(centered, weight, None, True, momentum, eps)
    variance = _rows(centered).square().mean(0)
    rstd = torch.rsqrt(variance + eps)
    ratio = _per_channel(rstd / rounded.detach(), input)
    y = y * ratio if bias is None else torch.addcmul(_per_channel(bias, input), y, ratio)
    return y, mean + rest.detach(), rstd, variance


def _rows(x: Tensor) -> Tensor:
    """Returns the numbers of images `[B, C, *]` as `[R, C]`, in the order that they have in memory."""
    return x.detach().movedim(1, -1).flatten(0, -2)


def _per_channel(values: Tensor, x: Tensor) -> Tensor:
    """Returns `[C]` as `[1, C, 1, ...]` for images `[B, C, *]`."""
    return values.reshape(1, -1, *(1 for _ in x.shape[2:]))
