"""Defines the Triton kernels of recurrent layers: all steps of one layer and direction in one kernel.

A program of the grid runs some rows of the batch of one member. Its state stays in registers, as chunks of
`C` columns. At each step it reads the products with x, which were computed before, and the hidden weights,
which are in a cache from the second step on. Sums, gates and activations are in float32. The state is
rounded to the dtype of y after each step, so a run of all steps equals several runs of some steps.

    p: [N, count, B, G*H], products with x and biases   w: [N, H, G*H]   b: [N, H] of a GRU's new gate
    h: [N, B, H] with the stride `h_stride` between members   c: [N, B, H] in float32, read and written
    y: [N, T, B, H], of which the steps from `first` to `first + count` are written
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import load_tile, multiply_add, rounded, sigmoid, store_tile, tanh, without_padding

# one compiled kernel serves all of these numbers, and pointers of any alignment
_NUMBERS = ["h_stride", "first", "count", "total", "batch"]
_POINTERS = ["h", "b"]


@triton.jit
def _gates(start, rows, at, batch, H: tl.constexpr, GATES: tl.constexpr):
    """Returns a tile of each gate's part of some rows `[batch, G*H]`, in float32."""
    tiles = ()
    for g in tl.static_range(GATES):
        tiles = tiles + (load_tile(start + g * H, rows, at, GATES * H, 1, batch, H).to(tl.float32),)
    return tiles


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_POINTERS)
def steps_kernel(
    p,
    w,
    b,
    c,
    h,
    y,
    h_stride,
    first,
    count,
    total,
    batch,
    GATES: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    REVERSE: tl.constexpr,
    RELU: tl.constexpr,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Runs a plain RNN (1 gate), a GRU (3) or an LSTM (4).

    The order of the gates is that of torch: reset, update, new of a GRU; input, forget, new, output of an
    LSTM. b is read if BIAS, and c by an LSTM. W: the numbers between the weights of two members, or 0. K: the
    number of chunks. R: the rows of a program. RELU: whether relu is the activation of a plain RNN.
    """
    member = tl.program_id(0).to(tl.int64)
    rows, columns = tl.program_id(1) * R + tl.arange(0, R), tl.arange(0, C)
    w += member * W
    c += member * batch * H
    state = ()
    cells = ()
    for k in tl.static_range(K):
        state = state + (load_tile(h + member * h_stride, rows, k * C + columns, H, 1, batch, H),)
        if GATES == 4:
            cells = cells + (load_tile(c, rows, k * C + columns, H, 1, batch, H),)
    for step in range(count):
        t = count - 1 - step if REVERSE else step
        given = p + (member * count + t) * batch * GATES * H
        made = y + (member * total + first + t) * batch * H
        new = ()
        kept = ()
        for j in tl.static_range(K):
            at = j * C + columns
            sums = _gates(given, rows, at, batch, H, GATES)
            if GATES == 3:  # the new gate's product with h is multiplied by the reset gate
                fresh = sums[2]
                hidden = tl.zeros((R, C), tl.float32)
                if BIAS:
                    bias = tl.load(b + member * H + at, mask=at < H, other=0.0)
                    hidden += bias.to(tl.float32)[None, :]
                sums = (sums[0], sums[1], hidden)
            for k in tl.static_range(K):
                more = ()
                for g in tl.static_range(GATES):
                    weight = load_tile(w + g * H, k * C + columns, at, GATES * H, 1, H, H)
                    more = more + (multiply_add(state[k], weight, sums[g], PRECISION),)
                sums = more
            if GATES == 1:
                out = tl.where(sums[0] < 0.0, 0.0, sums[0]) if RELU else tanh(sums[0])
            elif GATES == 3:
                fresh = tanh(fresh + sigmoid(sums[0]) * sums[2])
                out = fresh + sigmoid(sums[1]) * (state[j].to(tl.float32) - fresh)
            else:
                cell = sigmoid(sums[1]) * cells[j] + sigmoid(sums[0]) * tanh(sums[2])
                kept = kept + (cell,)
                out = sigmoid(sums[3]) * tanh(cell)
            out = rounded(without_padding(out, at, H, C), y, PRECISION)
            store_tile(made, out, rows, at, H, batch, H)
            new = new + (out,)
        state = new
        if GATES == 4:
            cells = kept
    if GATES == 4:
        for k in tl.static_range(K):
            store_tile(c, cells[k], rows, k * C + columns, H, batch, H)
