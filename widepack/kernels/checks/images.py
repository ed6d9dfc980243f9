"""Checks the operands of convolutions, pools and resampling.

oneDNN computes sizes with the numbers of a convolution, and divides by a stride. Pools trust the size or the
place of a window, resampling a scale, which may name places before the image.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .require import LARGEST, Check, OperandError, check_of, dense, numbers, readable, require

_LARGEST = 2**31


@check_of(
    "conv1d.default",
    "conv1d.padding",
    "conv2d.default",
    "conv2d.padding",
    "conv3d.default",
    "conv3d.padding",
    "conv_transpose1d.default",
    "conv_transpose2d.input",
    "conv_transpose3d.input",
    "convolution.default",
)
def convolution(input: Any, weight: Any, bias: Any = None, *numbers: Any, **named: Any) -> None:
    """Checks stride, padding, dilation, output padding and groups, in the order of the op."""
    for given in (*numbers, *named.values()):
        for value in given if isinstance(given, (list, tuple)) else (given,):
            if type(value) is int and not 0 <= value <= LARGEST:  # not bool, and not torch's SymInt
                raise OperandError(f"a number of the convolution is {value}; 0 to {LARGEST} are possible")


def geometry(
    spatial: int, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
) -> None:
    """Checks the literals of a convolution."""
    numbers("stride", stride, spatial, 1, 2**20)
    numbers("padding", padding, spatial, 0, 2**20)
    numbers("dilation", dilation, spatial, 1, 2**20)
    require(1 <= groups <= LARGEST, f"groups is {groups}; at least 1 is needed")


def extents(
    image: Sequence[int], kernel: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> None:
    """Checks that a kernel fits into the padded image."""
    for n, k, p, d in zip(image, kernel, padding, dilation):
        if n + 2 * p - d * (k - 1) - 1 < 0 or k < 1:
            raise OperandError(f"a kernel of {list(kernel)} does not fit into an image of {list(image)}")


def transposed_extents(
    image: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_padding: Sequence[int],
) -> None:
    """Checks the sizes of a transposed convolution's result."""
    numbers("output_padding", output_padding, len(kernel), 0, 2**20)
    for n, k, by, p, d, more in zip(image, kernel, stride, padding, dilation, output_padding):
        if more >= max(by, d):
            raise OperandError(f"output_padding {more} must be below stride {by} or dilation {d}")
        if n < 1 or k < 1 or (n - 1) * by - 2 * p + d * (k - 1) + more + 1 < 1:
            raise OperandError(f"a kernel of {list(kernel)} over an image of {list(image)} has no result")


@check_of("max_pool1d.default")
def max_pool1d(
    self: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> None:
    """Checks `aten.max_pool1d`: a window reaches past the padded row by less than a stride."""
    length = dense("self", self, 2, 3).shape[-1]
    lists: tuple[Any, ...] = (kernel_size, stride, padding, dilation)
    given = [v for values in lists for v in (values if isinstance(values, (list, tuple)) else [values])]
    if any(not isinstance(v, torch.SymInt) and not 0 <= v <= _LARGEST for v in given):
        raise OperandError(f"{given} contains a number outside of 0 to {_LARGEST}")
    kernel, step, pad, gap = (_first(values, default) for values, default in zip(lists, (1, 0, 0, 1)))
    if gap * (kernel - 1) + 1 > length + 2 * pad + (step or kernel) - 1 and length:
        raise OperandError(f"a window of {kernel} with dilation {gap} does not fit into {length} + 2 * {pad}")


@check_of(
    "fractional_max_pool2d.default", "fractional_max_pool3d.default", reads_values=True, sizes_of=("self",)
)
def fractional_max_pool(
    self: Tensor, kernel_size: Sequence[int], output_size: Sequence[int], random_samples: Tensor
) -> None:
    """Checks `aten.fractional_max_pool2d` and `3d`: numbers from 0 to 1 place the windows inside of a row."""
    dense("self", self)
    dense("random_samples", random_samples)
    given: list[Any] = list(kernel_size)
    if any(not isinstance(k, torch.SymInt) and k < 1 for k in given):
        raise OperandError(f"kernel_size is {given}; numbers from 1 are possible")
    if readable(random_samples):
        inside = (random_samples >= 0) & (random_samples <= 1)
        require(bool(inside.all()), "random_samples contains a number that is not from 0 to 1")


def _first(values: Any, default: int) -> Any:
    if isinstance(values, (list, tuple)):
        return values[0] if values else default
    return values


def upsample(spatial: int, *, corners: bool, smooth: bool = False, listed: bool = False) -> Check:
    """Returns the check of an op over `spatial` dims.

    Args:
        spatial: The number of dims.
        corners: Whether the op has `align_corners`.
        smooth: Whether it filters, so that a scale also determines how many places it reads.
        listed: Whether it takes a list of scales, and `output_size` may be None: the overload `vec`.
    """

    def check(input: Tensor, output_size: Sequence[int] | None, *rest: Any, **named: Any) -> None:
        given = (*rest[1 if corners else 0 :], *(v for k, v in named.items() if k != "align_corners"))
        dense("input", input, spatial + 2)
        full = all(size > 0 for size in input.shape[1:])
        require(full, f"input is {list(input.shape)}; only the batch may be empty")
        if output_size is not None or not listed:
            sizes = output_size or ()
            require(len(sizes) == spatial, f"output_size has {len(sizes)} numbers; {spatial} are needed")
            require(all(size > 0 for size in sizes), "output_size contains a number below 1")
        if listed:
            for scales in given:
                require(scales is None or len(scales) == spatial, f"{spatial} scales are needed")
                for scale in scales or ():
                    _scale(scale)
            return
        for scale, size, out in zip(given, input.shape[2:], output_size or ()):
            _scale(scale)
            fits = not smooth or _fits(scale, size, out)
            require(fits, f"a scale of {scale} does not make {out} of {size}")

    return check


for _name, _spatial, _corners in (
    ("_upsample_bicubic2d_aa", 2, True),
    ("_upsample_bilinear2d_aa", 2, True),
    ("_upsample_nearest_exact1d", 1, False),
    ("_upsample_nearest_exact2d", 2, False),
    ("_upsample_nearest_exact3d", 3, False),
    ("upsample_bicubic2d", 2, True),
    ("upsample_bilinear2d", 2, True),
    ("upsample_linear1d", 1, True),
    ("upsample_nearest1d", 1, False),
    ("upsample_nearest2d", 2, False),
    ("upsample_nearest3d", 3, False),
    ("upsample_trilinear3d", 3, True),
):
    _smooth = _name.endswith("_aa")
    check_of(f"{_name}.default")(upsample(_spatial, corners=_corners, smooth=_smooth))
    check_of(f"{_name}.vec")(upsample(_spatial, corners=_corners, listed=True))


def _fits(scale: Any, size: int, out: int) -> bool:
    """Returns whether a scale leads from one size to another. A smooth filter computes its width from it."""
    return not isinstance(scale, (int, float)) or out in (
        math.floor(size * scale - 1e-6),
        math.floor(size * scale + 1e-6),
    )


@check_of("grid_sampler.default", "grid_sampler_2d.default", "grid_sampler_3d.default")
def grid_sampler(
    input: Tensor, grid: Tensor, interpolation_mode: int, padding_mode: int, align_corners: bool = False
) -> None:
    """Checks the ops behind `grid_sample`: for a mode that does not exist they return unwritten memory."""
    modes = 3 if dense("input", input, 4, 5).dim() == 4 else 2
    require(
        interpolation_mode in range(modes),
        f"interpolation_mode is {interpolation_mode}; 0 to {modes - 1} are possible",
    )
    require(padding_mode in range(3), f"padding_mode is {padding_mode}; 0 to 2 are possible")


def _scale(scale: Any) -> None:
    if scale is None or isinstance(scale, torch.SymFloat):
        return
    if not isinstance(scale, (int, float)) or not (math.isfinite(scale) and 1e-6 <= scale <= 1e6):
        raise OperandError(f"a scale is {scale!r}; a number from 1e-6 to 1e6 is needed")
