"""Defines the Triton kernel of a chain of linear layers and activations, for all members.

A program of the grid runs some rows of one member through all layers. What a layer gives to the next one
stays in registers, as chunks of `C` columns. The input may be of any width: it is read in chunks, too. Sums
and activations are in float32. What a layer gives is rounded to the dtype of the weights.

    x: [N or 1, R, I]   weights of each layer: [N, O, I]   biases of each layer: [N, O] or none
    y: [N, R, O]
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import activation, load_tile, multiply_add, rounded, store_tile, without_padding


@triton.jit
def _added(bias, member, at, width, R: tl.constexpr, C: tl.constexpr):
    """Returns what a tile of sums starts from: the biases of its columns, or 0."""
    start = tl.zeros((R, C), tl.float32)
    if bias is not None:
        numbers = tl.load(bias + member * width + at, mask=at < width, other=0.0)
        start += numbers.to(tl.float32)[None, :]
    return start


@triton.jit
def _first_layer(
    x,
    w,
    bias,
    y,
    member,
    rows,
    row_count,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Returns what the first layer makes of a member's rows of x `[rows, I]`, as chunks of columns."""
    columns = tl.arange(0, C)
    sums = ()
    for j in tl.static_range((OUTPUTS + C - 1) // C):
        sums = sums + (_added(bias, member, j * C + columns, OUTPUTS, R, C),)
    for start in range(0, INPUTS, C):
        inner = start + columns
        part = load_tile(x, rows, inner, INPUTS, 1, row_count, INPUTS)
        more = ()
        for j in tl.static_range((OUTPUTS + C - 1) // C):
            weight = load_tile(
                w + member * OUTPUTS * INPUTS, inner, j * C + columns, 1, INPUTS, INPUTS, OUTPUTS
            )
            more = more + (multiply_add(part, weight, sums[j], PRECISION),)
        sums = more
    made = ()
    for j in tl.static_range((OUTPUTS + C - 1) // C):
        out = without_padding(activation(sums[j], ACTIVATION), j * C + columns, OUTPUTS, C)
        made = made + (rounded(out, y, PRECISION),)
    return made


@triton.jit
def _next_layer(
    parts,
    w,
    bias,
    y,
    member,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Returns what another layer makes of the chunks of the layer before it."""
    columns = tl.arange(0, C)
    made = ()
    for j in tl.static_range((OUTPUTS + C - 1) // C):
        at = j * C + columns
        total = _added(bias, member, at, OUTPUTS, R, C)
        for k in tl.static_range((INPUTS + C - 1) // C):
            weight = load_tile(w + member * OUTPUTS * INPUTS, k * C + columns, at, 1, INPUTS, INPUTS, OUTPUTS)
            total = multiply_add(parts[k], weight, total, PRECISION)
        out = without_padding(activation(total, ACTIVATION), at, OUTPUTS, C)
        made = made + (rounded(out, y, PRECISION),)
    return made


@triton.jit(do_not_specialize=["row_count"])
def chain_kernel(
    x,
    y,
    weights,
    biases,
    row_count,
    SHARED: tl.constexpr,
    WIDTHS: tl.constexpr,
    ACTIVATIONS: tl.constexpr,
    LAYERS: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Runs a chain. WIDTHS: the inputs of the first layer, then the outputs of each.

    SHARED: whether all members read the same x.
    """
    member = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * R + tl.arange(0, R)
    if not SHARED:
        x += member * row_count * WIDTHS[0]
    parts = _first_layer(
        x,
        weights[0],
        biases[0],
        y,
        member,
        rows,
        row_count,
        WIDTHS[0],
        WIDTHS[1],
        ACTIVATIONS[0],
        C,
        R,
        PRECISION,
    )
    for i in tl.static_range(1, LAYERS):
        parts = _next_layer(
            parts, weights[i], biases[i], y, member, WIDTHS[i], WIDTHS[i + 1], ACTIVATIONS[i], C, R, PRECISION
        )
    made = y + member * row_count * WIDTHS[LAYERS]
    for j in tl.static_range((WIDTHS[LAYERS] + C - 1) // C):
        columns = j * C + tl.arange(0, C)
        store_tile(made, parts[j], rows, columns, WIDTHS[LAYERS], row_count, WIDTHS[LAYERS])
