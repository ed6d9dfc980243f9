"""Checks the operands of resampling ops: scales that name places before the image, and unknown modes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .require import OperandError, dense, require


def upsample(spatial: int, *, corners: bool, smooth: bool = False) -> Callable[..., None]:
    """Returns the check of an op over `spatial` dims. corners: whether it has `align_corners`.
    smooth: whether it filters, so that a scale also determines how many places it reads.
    """

    def check(input: Tensor, output_size: Sequence[int], *rest: Any, **named: Any) -> None:
        given = (*rest[1 if corners else 0 :], *(v for k, v in named.items() if k != "align_corners"))
        _image(input, spatial)
        _sizes(output_size, spatial)
        for scale, size, out in zip(given, input.shape[2:], output_size):
            _scale(scale)
            require(
                not smooth or _fits(scale, size, out), f"a scale of {scale} does not make {out} of {size}"
            )

    return check


def _fits(scale: Any, size: int, out: int) -> bool:
    """Returns whether a scale leads from one size to another. A smooth filter computes its width from it."""
    return not isinstance(scale, (int, float)) or out in (
        math.floor(size * scale - 1e-6),
        math.floor(size * scale + 1e-6),
    )


def upsample_list(spatial: int, *, corners: bool) -> Callable[..., None]:
    """Returns the check of the overload `vec`, which takes a list of scales."""

    def check(input: Tensor, output_size: Sequence[int] | None, *rest: Any, **named: Any) -> None:
        given = (*rest[1 if corners else 0 :], *(v for k, v in named.items() if k != "align_corners"))
        _image(input, spatial)
        if output_size is not None:
            _sizes(output_size, spatial)
        for scales in given:
            require(scales is None or len(scales) == spatial, f"{spatial} scales are needed")
            for scale in scales or ():
                _scale(scale)

    return check


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


def _image(x: Tensor, spatial: int) -> None:
    dense("input", x, spatial + 2)
    require(all(size > 0 for size in x.shape[1:]), f"input is {list(x.shape)}; only the batch may be empty")


def _sizes(sizes: Sequence[int], spatial: int) -> None:
    require(len(sizes) == spatial, f"output_size has {len(sizes)} numbers; {spatial} are needed")
    require(all(size > 0 for size in sizes), "output_size contains a number below 1")


def _scale(scale: Any) -> None:
    if scale is None or isinstance(scale, torch.SymFloat):
        return
    if not isinstance(scale, (int, float)) or not (math.isfinite(scale) and 1e-6 <= scale <= 1e6):
        raise OperandError(f"a scale is {scale!r}; a number from 1e-6 to 1e6 is needed")
