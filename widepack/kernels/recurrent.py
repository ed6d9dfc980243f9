"""Defines widepack's own recurrent ops: one layer in one direction over all steps, for all members.

| op | what it computes |
|---|---|
| `rnn_steps(x, h, w_x, w_h, b_x, b_h, reverse, act)` | h' = act(x W_x + b_x + h W_h + b_h) -> y |
| `gru_steps(x, h, w_x, w_h, b_x, b_h, reverse)` | the same with the gates of `aten.gru` -> y |
| `lstm_steps(x, h, c, w_x, w_h, b_x, b_h, w_p, reverse)` | with the gates of `aten.lstm` -> (y, last c) |
| `pack_lstm(w_x, w_h, reverse, size)` | N layers' weights in oneDNN's order: N for x, then N for h |
| `packed_lstm(x, h, c, weights, b_x, b_h, reverse)` | `lstm_steps` over those, one call for each member |

`act` is `tanh` or `relu`. `size` is an example of x's `[T, B, I]`, a hint for the order.

    x: [N, T, B, I], or [1, T, B, I] for all members   w_x: [N, I, G*H]   b_x, b_h: [N, G*H] or none
    w_h: [N, P, G*H]   w_p: [N, H, P] or none, then P = H   h: [N, B, P]   c: [N, B, H]
    y: [N, T, B, P], contiguous; with `reverse` the steps run from the last to the first, each answer at its
        own step

Weights are transposed: a step is one batched product, and reads the rows of the weights in the order of
memory. Members run in blocks whose step takes up to `BLOCK_BYTES`, so the next step finds their hidden
weights in the cache. The products with x are computed for as many steps at once as fit in `PROJECTED_BYTES`,
so memory does not grow with T. No step allocates memory.

On a CUDA device, one Triton kernel may run all steps (`triton_kernels`).

`decompose.py` writes each op as ATen's op once for each member. That is right for any T, but then the program
is exported for one T.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from . import onednn
from .checks.require import OperandError, dense, for_members, numbers, of_shape, require
from .library import own_op
from .onednn import mark_of, usable
from .projections import projected_parts
from .triton_kernels import launches

BLOCK_BYTES = 2 << 20
"""The bytes that one step of a block of members may read and write, mostly hidden weights."""
PROJECTED_BYTES = 8 << 20
"""The bytes of products with x that are computed before the steps that read them."""


def step_blocks(h: Tensor, w_h: Tensor) -> Iterator[slice]:
    """Yields blocks of members of about equal size. On other devices, where launches cost most, there is one
    block.

    A member's step reads its hidden weights and the products with x, and writes as many sums and a few more
    values.
    """
    members, batch, width = h.shape
    numbers = w_h[0].numel() + batch * (2 * w_h.shape[2] + 3 * width)
    most = max(1, BLOCK_BYTES // max(1, numbers * w_h.element_size())) if h.device.type == "cpu" else members
    count = -(-members // most)
    for i in range(count):
        yield slice(members * i // count, members * (i + 1) // count)


def _block_of(x: Tensor | None, block: slice) -> Tensor | None:
    return None if x is None else x[block]


def _contiguous_input(x: Tensor) -> Tensor:
    """Returns x contiguous. Raises RuntimeError if it has no steps, as the member does."""
    if x.shape[1] == 0:
        raise RuntimeError("Expected sequence length to be larger than 0 in RNN")
    return x.contiguous()


def _steps(
    block: slice, x: Tensor, w_x: Tensor, bias: Tensor | None, reverse: bool
) -> Iterator[tuple[int, Tensor]]:
    """Yields (t, x[t] W_x + bias: [n, B, G*H]) for each step of a block. Many steps are one product.

    A yielded tensor is valid until the next one is requested.
    """
    w_x, bias = w_x[block], _block_of(bias, block)
    x = x[block] if x.shape[0] > 1 else x.expand(w_x.shape[0], -1, -1, -1)  # without a copy
    for first, products in projected_parts(x, w_x, bias, reverse, PROJECTED_BYTES):
        steps = list(enumerate(products.unbind(1), first))
        yield from reversed(steps) if reverse else steps


def sum_of(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Returns the sum of two biases, each of which may be absent."""
    return a if b is None else b if a is None else a + b


def require_activation(act: str) -> None:
    """Checks the activation of a plain RNN. Raises: ValueError."""
    if act not in ("tanh", "relu"):
        raise ValueError(
            f"widepack: the activation {act!r} of a recurrent layer is unknown; known: tanh, relu"
        )


def check_layer(
    gates: int,
    x: Tensor,
    h: Tensor,
    w_x: Tensor,
    w_h: Tensor,
    b_x: Tensor | None,
    b_h: Tensor | None,
    c: Tensor | None = None,
    w_p: Tensor | None = None,
) -> None:
    """Checks the operands of a layer. gates: 1 of a plain RNN, 3 of a GRU, 4 of an LSTM, which has c too."""
    members, batch, out = dense("h", h, 3).shape
    for_members("x", x, members, [None, batch, None], h)
    columns = w_x.shape[-1] if w_x.dim() else 0
    of_shape("w_x", w_x, [members, x.shape[3], columns], h)
    of_shape("w_h", w_h, [members, out, columns], h)
    of_shape("b_x", b_x, [members, columns], h)
    of_shape("b_h", b_h, [members, columns], h)
    width = columns // gates
    require(columns % gates == 0, f"{columns} rows are not {gates} gates")
    of_shape("c", c, [members, batch, width], h)
    of_shape("w_p", w_p, [members, width, out], h)
    require(w_p is not None or width == out, f"w_x is for a state of {width}; h has {out}")


def _fake_steps(x: Tensor, h: Tensor, *_: Any) -> Tensor:
    return x.new_empty(h.shape[0], x.shape[1], x.shape[2], h.shape[2])


def _fake_lstm(x: Tensor, h: Tensor, c: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _fake_steps(x, h), c.new_empty(c.shape)


def _fake_pack_lstm(w_x: Tensor, w_h: Tensor, *_: Any) -> list[Tensor]:
    return [w.new_empty(w.shape[1], w.shape[0]) for many in (w_x, w_h) for w in many.unbind(0)]


@own_op(
    "rnn_steps(Tensor x, Tensor h, Tensor w_x, Tensor w_h, Tensor? b_x, Tensor? b_h, bool reverse, str act)"
    " -> Tensor",
    _fake_steps,
)
def _rnn_steps(
    x: Tensor,
    h: Tensor,
    w_x: Tensor,
    w_h: Tensor,
    b_x: Tensor | None,
    b_h: Tensor | None,
    reverse: bool,
    act: str,
) -> Tensor:
    check_layer(1, x, h, w_x, w_h, b_x, b_h)
    require_activation(act)
    act_into = torch.ops.aten.tanh.out if act == "tanh" else torch.ops.aten.relu.out
    x, bias = _contiguous_input(x), sum_of(b_x, b_h)
    if made := launches.run_steps("rnn", x, h, w_x, w_h, bias, reverse, relu=act == "relu"):
        return made[0]
    y = _fake_steps(x, h)
    for block in step_blocks(h, w_h):
        state, weight, outs = h[block], w_h[block], y[block].unbind(1)
        sums = x.new_empty(state.shape)
        for t, projected in _steps(block, x, w_x, bias, reverse):
            torch.bmm(state, weight, out=sums).add_(projected)
            state = act_into(sums, out=outs[t])
    return y


@own_op(
    "gru_steps(Tensor x, Tensor h, Tensor w_x, Tensor w_h, Tensor? b_x, Tensor? b_h, bool reverse) -> Tensor",
    _fake_steps,
)
def _gru_steps(
    x: Tensor, h: Tensor, w_x: Tensor, w_h: Tensor, b_x: Tensor | None, b_h: Tensor | None, reverse: bool
) -> Tensor:
    check_layer(3, x, h, w_x, w_h, b_x, b_h)
    x, width = _contiguous_input(x), h.shape[2]
    bias, after = b_x, None
    if b_h is not None:  # the new gate's part is added inside the reset gate's product
        bias = sum_of(b_x, torch.cat([b_h[:, : 2 * width], torch.zeros_like(b_h[:, 2 * width :])], 1))
        after = b_h[:, 2 * width :].unsqueeze(1)
    if made := launches.run_steps("gru", x, h, w_x, w_h, bias, reverse, new_bias=after):
        return made[0]
    y = _fake_steps(x, h)
    for block in step_blocks(h, w_h):
        state, weight, outs, add = h[block], w_h[block], y[block].unbind(1), _block_of(after, block)
        sums = x.new_empty(*state.shape[:2], 3 * width)
        gates = sums[..., : 2 * width]
        reset, update, hidden = sums.chunk(3, -1)
        new = x.new_empty(state.shape)
        for t, projected in _steps(block, x, w_x, bias, reverse):
            torch.bmm(state, weight, out=sums)
            gates.add_(projected[..., : 2 * width]).sigmoid_()
            if add is not None:
                hidden.add_(add)
            torch.addcmul(projected[..., 2 * width :], reset, hidden, out=new).tanh_()
            state = torch.lerp(new, state, update, out=outs[t])
    return y


@own_op(
    "lstm_steps(Tensor x, Tensor h, Tensor c, Tensor w_x, Tensor w_h, Tensor? b_x, Tensor? b_h, Tensor? w_p,"
    " bool reverse) -> (Tensor, Tensor)",
    _fake_lstm,
)
def _lstm_steps(
    x: Tensor,
    h: Tensor,
    c: Tensor,
    w_x: Tensor,
    w_h: Tensor,
    b_x: Tensor | None,
    b_h: Tensor | None,
    w_p: Tensor | None,
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    check_layer(4, x, h, w_x, w_h, b_x, b_h, c, w_p)
    x, bias, width = _contiguous_input(x), sum_of(b_x, b_h), c.shape[2]
    if w_p is None and (made := launches.run_steps("lstm", x, h, w_x, w_h, bias, reverse, c=c)):
        y, last = made
        assert last is not None
        return y, last
    y, last = _fake_lstm(x, h, c)
    for block in step_blocks(h, w_h):
        state, weight, outs, project = h[block], w_h[block], y[block].unbind(1), _block_of(w_p, block)
        cell = last[block].copy_(c[block])
        sums, seen = x.new_empty(*cell.shape[:2], 4 * width), x.new_empty(cell.shape)
        take, keep, new, out = sums.chunk(4, -1)
        first, bounded = sums[..., : 2 * width], torch.empty_like(seen)
        for t, projected in _steps(block, x, w_x, bias, reverse):
            torch.bmm(state, weight, out=sums).add_(projected)
            first.sigmoid_()
            out.sigmoid_()
            torch.tanh(new, out=bounded)
            cell.mul_(keep).addcmul_(take, bounded)
            torch.tanh(cell, out=seen)
            state = (
                torch.mul(seen, out, out=outs[t])
                if project is None
                else torch.bmm(seen.mul_(out), project, out=outs[t])
            )
    return y, last


@own_op("pack_lstm(Tensor w_x, Tensor w_h, bool reverse, int[] size) -> Tensor[]", _fake_pack_lstm)
def _pack_lstm(w_x: Tensor, w_h: Tensor, reverse: bool, size: list[int]) -> list[Tensor]:
    members, inputs, rows = dense("w_x", w_x, 3).shape
    units = dense("w_h", w_h, 3).shape[1]
    of_shape("w_h", w_h, [members, units, rows], w_x)
    require(rows == 4 * units, f"w_x has {rows} rows; 4 * {units} are needed")
    numbers("size", size, 3, 0, 2**24)
    require(size[2] == inputs, f"size is for inputs of {size[2]}; w_x has {inputs}")
    # the order of torch's own layers
    pairs = [(a.t().contiguous(), b.t().contiguous()) for a, b in zip(w_x.unbind(0), w_h.unbind(0))]
    if usable(w_x) and usable(w_h):
        # oneDNN refuses an input without steps or rows, as an example
        example = [max(1, n) for n in size]
        pairs = [onednn.reorder_lstm_weights(a, b, reverse, example) for a, b in pairs]
    packed = (*(a for a, _ in pairs), *(b for _, b in pairs))
    return [onednn.mark(w, w_x.dtype, "lstm", bool(reverse)) for w in packed]


@own_op(
    "packed_lstm(Tensor x, Tensor h, Tensor c, Tensor[] weights, Tensor? b_x, Tensor? b_h, bool reverse)"
    " -> (Tensor, Tensor)",
    _fake_lstm,
)
def _packed_lstm(
    x: Tensor,
    h: Tensor,
    c: Tensor,
    weights: list[Tensor],
    b_x: Tensor | None,
    b_h: Tensor | None,
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    members, batch, units = dense("h", h, 3).shape
    for_members("x", x, members, [None, batch, None], h)
    of_shape("c", c, h.shape, h)
    if len(weights) != 2 * members or not members:
        raise OperandError(f"there are {len(weights)} weights; two for each of {members} members are needed")
    marked = [mark_of(f"weights[{k}]", w, "lstm", bool(reverse)) is not None for k, w in enumerate(weights)]
    packed = marked[0]
    require(all(m == packed for m in marked), "some of the weights are packed")
    for k, weight in enumerate(weights):
        inputs = x.shape[3] if k < members else units
        wanted = [1, 1, inputs, 4, units] if packed else [4 * units, inputs]
        if list(weight.shape) != wanted or weight.dtype != h.dtype:
            raise OperandError(f"weights[{k}] is {list(weight.shape)}; {wanted} is needed")
    if packed:
        require(h.dtype is torch.float32 and h.device.type == "cpu", "h is not float32 on the CPU")
    of_shape("b_x", b_x, [members, 4 * units], h)
    of_shape("b_h", b_h, [members, 4 * units], h)
    w_x, w_h = weights[:members], weights[members:]
    if not packed:
        stacked_x, stacked_h = (torch.stack(w).transpose(1, 2) for w in (w_x, w_h))
        return _lstm_steps(x, h, c, stacked_x, stacked_h, b_x, b_h, None, reverse)
    if x.shape[2] == 0:  # oneDNN refuses an empty batch
        return _fake_lstm(x, h, c)
    x = _contiguous_input(x)
    y, last = _fake_lstm(x, h, c)
    if b_x is None or b_h is None:
        b_x = b_h = x.new_zeros(members, 4 * h.shape[2])
    xs = x.unbind(0) if x.shape[0] > 1 else [x[0]] * members
    for i, (hi, ci, bx, bh) in enumerate(
        zip(
            h.contiguous().unbind(0),
            c.contiguous().unbind(0),
            b_x.contiguous().unbind(0),
            b_h.contiguous().unbind(0),
        )
    ):
        # 2: an LSTM; one layer, of one direction, time first, not training
        y[i], _, last[i], _ = torch.ops.aten.mkldnn_rnn_layer(
            xs[i], w_x[i], w_h[i], bx, bh, hi, ci, reverse, [], 2, h.shape[2], 1, True, False, False, False
        )
    return y, last
