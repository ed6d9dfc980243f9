"""Checks the literals and sizes of widepack's own convolutions."""

from __future__ import annotations

from collections.abc import Sequence

from .require import LARGEST, OperandError, numbers, require


def geometry(
    spatial: int, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
) -> None:
    """Checks the literals of a convolution."""
    numbers("stride", stride, spatial, 1, 2**20)
    numbers("padding", padding, spatial, 0, 2**20)
    numbers("dilation", dilation, spatial, 1, 2**20)
    require(1 <= groups <= LARGEST, f"groups is {groups}; at least 1 is needed")


def extents(
    image: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
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
