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

_NUMBERS = ["h_stride", "first", "count", "total", "batch"]
_POINTERS = ["h", "b"]
# one compiled kernel serves all of these numbers, and pointers of any alignment


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_POINTERS)
def rnn_kernel(
    p,
    w,
    h,
    y,
    h_stride,
    first,
    count,
    total,
    batch,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    REVERSE: tl.constexpr,
    RELU: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Runs a plain RNN.

    W: the numbers between the weights of two members, or 0. K: the number of chunks. R: the rows of a
    program.
    """
    member = tl.program_id(0).to(tl.int64)
    rows, columns = tl.program_id(1) * R + tl.arange(0, R), tl.arange(0, C)
    w += member * W
    state = ()
    for k in tl.static_range(K):
        state = state + (load_tile(h + member * h_stride, rows, k * C + columns, H, 1, batch, H),)
    for step in range(count):
        t = count - 1 - step if REVERSE else step
        given, made = p + (member * count + t) * batch * H, y + (member * total + first + t) * batch * H
        new = ()
        for j in tl.static_range(K):
            at = j * C + columns
            total_sum = load_tile(given, rows, at, H, 1, batch, H).to(tl.float32)
            for k in tl.static_range(K):
                weight = load_tile(w, k * C + columns, at, H, 1, H, H)
                total_sum = multiply_add(state[k], weight, total_sum, PRECISION)
            out = tl.where(total_sum < 0.0, 0.0, total_sum) if RELU else tanh(total_sum)
            out = rounded(without_padding(out, at, H, C), y, PRECISION)
            store_tile(made, out, rows, at, H, batch, H)
            new = new + (out,)
        state = new


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_POINTERS)
def gru_kernel(
    p,
    w,
    b,
    h,
    y,
    h_stride,
    first,
    count,
    total,
    batch,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    REVERSE: tl.constexpr,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Runs a GRU. The order of the gates is that of torch: reset, update, new."""
    member = tl.program_id(0).to(tl.int64)
    rows, columns = tl.program_id(1) * R + tl.arange(0, R), tl.arange(0, C)
    w += member * W
    state = ()
    for k in tl.static_range(K):
        state = state + (load_tile(h + member * h_stride, rows, k * C + columns, H, 1, batch, H),)
    for step in range(count):
        t = count - 1 - step if REVERSE else step
        given, made = p + (member * count + t) * batch * 3 * H, y + (member * total + first + t) * batch * H
        new = ()
        for j in tl.static_range(K):
            at = j * C + columns
            reset = load_tile(given, rows, at, 3 * H, 1, batch, H).to(tl.float32)
            update = load_tile(given + H, rows, at, 3 * H, 1, batch, H).to(tl.float32)
            fresh = load_tile(given + 2 * H, rows, at, 3 * H, 1, batch, H).to(tl.float32)
            hidden = tl.zeros((R, C), tl.float32)
            if BIAS:
                bias = tl.load(b + member * H + at, mask=at < H, other=0.0)
                hidden += bias.to(tl.float32)[None, :]
            for k in tl.static_range(K):
                inner = k * C + columns
                weight = load_tile(w, inner, at, 3 * H, 1, H, H)
                reset = multiply_add(state[k], weight, reset, PRECISION)
                weight = load_tile(w + H, inner, at, 3 * H, 1, H, H)
                update = multiply_add(state[k], weight, update, PRECISION)
                weight = load_tile(w + 2 * H, inner, at, 3 * H, 1, H, H)
                hidden = multiply_add(state[k], weight, hidden, PRECISION)
            fresh = tanh(fresh + sigmoid(reset) * hidden)
            out = without_padding(fresh + sigmoid(update) * (state[j].to(tl.float32) - fresh), at, H, C)
            out = rounded(out, y, PRECISION)
            store_tile(made, out, rows, at, H, batch, H)
            new = new + (out,)
        state = new


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_POINTERS)
def lstm_kernel(
    p,
    w,
    c,
    h,
    y,
    h_stride,
    first,
    count,
    total,
    batch,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Runs an LSTM. The order of the gates is that of torch: input, forget, new, output."""
    member = tl.program_id(0).to(tl.int64)
    rows, columns = tl.program_id(1) * R + tl.arange(0, R), tl.arange(0, C)
    w += member * W
    c += member * batch * H
    state = ()
    cells = ()
    for k in tl.static_range(K):
        state = state + (load_tile(h + member * h_stride, rows, k * C + columns, H, 1, batch, H),)
        cells = cells + (load_tile(c, rows, k * C + columns, H, 1, batch, H),)
    for step in range(count):
        t = count - 1 - step if REVERSE else step
        given, made = p + (member * count + t) * batch * 4 * H, y + (member * total + first + t) * batch * H
        new = ()
        kept = ()
        for j in tl.static_range(K):
            at = j * C + columns
            take = load_tile(given, rows, at, 4 * H, 1, batch, H).to(tl.float32)
            keep = load_tile(given + H, rows, at, 4 * H, 1, batch, H).to(tl.float32)
            fresh = load_tile(given + 2 * H, rows, at, 4 * H, 1, batch, H).to(tl.float32)
            show = load_tile(given + 3 * H, rows, at, 4 * H, 1, batch, H).to(tl.float32)
            for k in tl.static_range(K):
                inner = k * C + columns
                weight = load_tile(w, inner, at, 4 * H, 1, H, H)
                take = multiply_add(state[k], weight, take, PRECISION)
                weight = load_tile(w + H, inner, at, 4 * H, 1, H, H)
                keep = multiply_add(state[k], weight, keep, PRECISION)
                weight = load_tile(w + 2 * H, inner, at, 4 * H, 1, H, H)
                fresh = multiply_add(state[k], weight, fresh, PRECISION)
                weight = load_tile(w + 3 * H, inner, at, 4 * H, 1, H, H)
                show = multiply_add(state[k], weight, show, PRECISION)
            cell = sigmoid(keep) * cells[j] + sigmoid(take) * tanh(fresh)
            out = rounded(without_padding(sigmoid(show) * tanh(cell), at, H, C), y, PRECISION)
            store_tile(made, out, rows, at, H, batch, H)
            new = new + (out,)
            kept = kept + (cell,)
        state = new
        cells = kept
    for k in tl.static_range(K):
        store_tile(c, cells[k], rows, k * C + columns, H, batch, H)
