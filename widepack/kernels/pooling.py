"""Computes `max_pool2d` on a CPU by maxima of slices: torch's kernel takes 2 to 20 times as long.

torch's kernel for its own memory order visits the numbers of each window one by one, and both of its kernels
compute indices that no program reads. A maximum of slices reads rows of numbers, without indices. The answer
is the same in every bit, and so is NaN: both take NaN for the largest number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

LEAST = 1 << 16
"""The least numbers of all samples and channels for slices. Their calls take longer to start."""
LEAST_LAST = 1 << 18
"""The same in channels-last memory, where torch's kernel is faster. With padding it is the fastest there."""
_MOST = 9
"""The largest window, in numbers."""


def max_pool2d(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> Tensor:
    """Computes `aten.max_pool2d`, for inference on a CPU by maxima of slices.

    Programs that are traced, and those with gradients, call the op itself (`ir/ops.py`).
    """
    if torch.is_inference_mode_enabled() and type(x) is Tensor and not ceil_mode:
        window, margin = _pair(kernel_size), _pair(padding)
        step = _pair(stride) if stride else window
        lengths = [len(numbers) for numbers in (kernel_size, stride or kernel_size, padding, dilation)]
        if max(lengths) <= 2 and set(dilation) == {1} and _fits(x, window, step, margin):
            if any(margin):
                sides = (margin[1], margin[1], margin[0], margin[0])
                x = torch.nn.functional.pad(x, sides, value=-math.inf)
            for dim in sorted((-2, -1), key=lambda d: window[d]):  # views come first, maxima are dense
                x = _pooled(x, dim, window[dim], step[dim])
            return x
    y: Tensor = torch.ops.aten.max_pool2d.default(x, kernel_size, stride, padding, dilation, ceil_mode)
    return y


def _pair(numbers: Sequence[int]) -> tuple[int, int]:
    return (numbers[0], numbers[-1])


def _fits(x: Tensor, window: tuple[int, int], step: tuple[int, int], margin: tuple[int, int]) -> bool:
    """Whether slices give the answer in less time. Wrong operands are left to torch, which refuses them."""
    if x.device.type != "cpu" or not x.is_floating_point() or x.dim() not in (3, 4) or x.numel() < LEAST:
        return False
    if x.stride(-3) == 1 and (x.numel() < LEAST_LAST or any(margin)):
        return False
    return (
        min(window) >= 1
        and 1 < window[0] * window[1] <= _MOST
        and min(step) >= 1
        and all(0 <= m <= k // 2 for m, k in zip(margin, window))
        and all(n >= k for n, k in zip(x.shape[-2:], window))
    )


def _pooled(x: Tensor, dim: int, window: int, step: int) -> Tensor:
    """Returns the maxima along one dim."""
    if window == 1 and step == 1:
        return x
    length = step * ((x.shape[dim] - window) // step) + 1

    def at(place: int) -> Tensor:
        places = slice(place, place + length, step)
        return x[..., places, :] if dim == -2 else x[..., places]

    if window == 1:
        return at(0)
    y = torch.maximum(at(0), at(1))
    for place in range(2, window):
        torch.maximum(y, at(place), out=y)
    return y
