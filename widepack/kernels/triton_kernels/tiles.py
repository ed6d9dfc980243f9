"""Provides the parts that widepack's Triton kernels share: tiles of memory, and activations.

This module imports Triton. Only the other modules of kernels import it, which import it when they are used.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .available import ACTIVATIONS

# Triton 3.6 takes numbers in a tuple of constants, and no texts.
_RELU = tl.constexpr(ACTIVATIONS.index("relu"))
_TANH = tl.constexpr(ACTIVATIONS.index("tanh"))
_SIGMOID = tl.constexpr(ACTIVATIONS.index("sigmoid"))
_SILU = tl.constexpr(ACTIVATIONS.index("silu"))
_GELU = tl.constexpr(ACTIVATIONS.index("gelu"))
_GELU_TANH = tl.constexpr(ACTIVATIONS.index("gelu_tanh"))


@triton.jit
def load_tile(pointer, rows, columns, row_stride, column_stride, row_count, column_count):
    """Returns a tile of a matrix in memory. Places outside of the matrix are 0."""
    inside = (rows < row_count)[:, None] & (columns < column_count)[None, :]
    at = rows[:, None] * row_stride + columns[None, :] * column_stride
    return tl.load(pointer + at, mask=inside, other=0.0)


@triton.jit
def store_tile(pointer, tile, rows, columns, row_stride, row_count, column_count):
    """Writes a tile into a matrix with contiguous rows. Places outside of the matrix are not written."""
    inside = (rows < row_count)[:, None] & (columns < column_count)[None, :]
    tl.store(pointer + rows[:, None] * row_stride + columns[None, :], tile, mask=inside)


@triton.jit
def without_padding(tile, columns, COUNT: tl.constexpr, C: tl.constexpr):
    """Returns a tile with 0 in columns from `COUNT` on: inf times the 0 of a padded weight made them NaN."""
    if COUNT % C != 0:
        tile = tl.where((columns < COUNT)[None, :], tile, 0.0)
    return tile


@triton.jit
def multiply_add(left, right, total, PRECISION: tl.constexpr):
    """Returns left @ right + total, in float32.

    PRECISION: of float32 factors, as `tl.dot` takes it. `cast` casts the factors to float32 first, which
    changes no product. Triton's interpreter needs it, because it multiplies the codes of bfloat16 numbers.
    """
    if PRECISION == "cast":
        total = tl.dot(left.to(tl.float32), right.to(tl.float32), total, input_precision="ieee")
    else:
        total = tl.dot(left, right, total, input_precision=PRECISION)
    return total


@triton.jit
def rounded(x, like, PRECISION: tl.constexpr):
    """Returns float32 numbers in the dtype that a pointer points to, rounded to the nearest, ties to even.

    With the precision `cast` the bits of bfloat16 are rounded here, because Triton's interpreter truncates.
    """
    if PRECISION == "cast" and like.dtype.element_ty == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        x = (bits & 0xFFFF0000).to(tl.uint32).to(tl.float32, bitcast=True)
    return x.to(like.dtype.element_ty)


@triton.jit
def tanh(x):
    """Returns tanh(x), in float32. Small numbers keep all their digits."""
    square = x * x
    # The polynomial of (tanh(x) / x - 1) / x^2 for |x| < 0.6, fitted at Chebyshev nodes: error below 1 ulp.
    term = -0.005900357384234667
    term = term * square + 0.02080061472952366
    term = term * square - 0.05378526821732521
    term = term * square + 0.1333194226026535
    term = term * square - 0.33333298563957214
    size = tl.abs(x)
    large = 1.0 - 2.0 / (tl.exp(2.0 * size) + 1.0)
    return tl.where(size < 0.6, x + x * square * term, tl.where(x < 0.0, -large, large))


@triton.jit
def sigmoid(x):
    """Returns 1 / (1 + exp(-x)), in float32."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def activation(x, NUMBER: tl.constexpr):
    """Returns an activation of x, in float32. NUMBER: its place in `ACTIVATIONS`. NaN stays NaN."""
    if NUMBER == _RELU:
        x = tl.where(x < 0.0, 0.0, x)
    elif NUMBER == _TANH:
        x = tanh(x)
    elif NUMBER == _SIGMOID:
        x = sigmoid(x)
    elif NUMBER == _SILU:
        x = x * sigmoid(x)
    elif NUMBER == _GELU:
        x = 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))
    elif NUMBER == _GELU_TANH:
        x = 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    return x
