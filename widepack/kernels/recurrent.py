"""widepack's own ops for recurrent layers: one layer in one direction over all its steps, for all members, the loop over time inside.

| op | what it is |
|---|---|
| `widepack::rnn_steps(x, h, w_x, w_h, b_x, b_h, reverse, act)` | h' = act(x W_x + b_x + h W_h + b_h), act `tanh` or `relu` -> y |
| `widepack::gru_steps(x, h, w_x, w_h, b_x, b_h, reverse)` | the same with reset and update gates, as `aten.gru` has them -> y |
| `widepack::lstm_steps(x, h, c, w_x, w_h, b_x, b_h, w_p, reverse)` | the same with input, forget, cell and output gates, as `aten.lstm` has them -> (y, c of the last step) |
| `widepack::pack_lstm(w_x, w_h, reverse, size)` | N layers' weights, each in oneDNN's order: a list of N for x, then N for h. size: an example of x's `[T, B, I]`: a hint |
| `widepack::packed_lstm(x, h, c, weights, b_x, b_h, reverse)` | `lstm_steps` over those, one oneDNN call a member |

    x: [N, T, B, I], or [1, T, B, I] for all members   w_x: [N, I, G*H]   b_x, b_h: [N, G*H] or none   w_h: [N, P, G*H]   w_p: [N, H, P] or none, then P = H
    h: [N, B, P]   c: [N, B, H]   y: [N, T, B, P], contiguous; with `reverse` from the last step to the first, each answer at its own step

Weights are turned: a step is one batched product, and their rows lie in memory as it reads them. Members go in blocks whose step takes up to `BLOCK_BYTES`, so
that their hidden weights are found in the cache by the next one; the products with x are made for as many steps at once as fit `PROJECTED_BYTES`, so that memory does not grow with T. Each step
works in memory that was there before it.

`members` writes an op as ATen's own, once a member, for readers that know no others: right for any T, and no longer a program for a longer sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from widepack_artifacts.program import Node, Ref

from .onednn import usable
from .library import define

BLOCK_BYTES = 2 << 20
"""What a step of the members that go through time together reads and writes, their hidden weights above all."""
PROJECTED_BYTES = 8 << 20
"""Products with x that are made before the steps that read them."""
OPS = ("widepack.rnn_steps.default", "widepack.gru_steps.default", "widepack.lstm_steps.default", "widepack.packed_lstm.default")


def _blocks(h: Tensor, w_h: Tensor) -> Iterator[slice]:
    """Members in blocks of about equal size; on other devices than a CPU all of them, since launches are what costs there.

    A member's step reads its hidden weights and what x gave, and writes as many sums and a few values more.
    """
    members, batch, width = h.shape
    numbers = w_h[0].numel() + batch * (2 * w_h.shape[2] + 3 * width)
    most = max(1, BLOCK_BYTES // max(1, numbers * w_h.element_size())) if h.device.type == "cpu" else members
    count = -(-members // most)
    for i in range(count):
        yield slice(members * i // count, members * (i + 1) // count)


def _of(x: Tensor | None, block: slice) -> Tensor | None:
    return None if x is None else x[block]


def _given(x: Tensor, block: slice) -> Tensor:
    """The block's x, memory in the order of its dims; one for all members is one still."""
    return x[block] if x.shape[0] > 1 else x.expand(block.stop - block.start, -1, -1, -1)


def _checked(x: Tensor) -> Tensor:
    """x in the order of its dims. Raises: RuntimeError for no steps, as the member does."""
    if x.shape[1] == 0:
        raise RuntimeError("Expected sequence length to be larger than 0 in RNN")
    return x.contiguous()


def _steps(x: Tensor, w_x: Tensor, bias: Tensor | None, reverse: bool) -> Iterator[tuple[int, Tensor]]:
    """(t, x[t] W_x + bias: [n, B, G*H]) step by step; many steps are one product. What is given holds until the next one is asked for."""
    members, total, batch, inputs = x.shape
    step = members * batch * w_x.shape[2]
    few = min(total, max(1, PROJECTED_BYTES // max(1, step * x.element_size())))
    memory = x.new_empty(few * step)
    starts = range(0, total, few)
    for start in reversed(starts) if reverse else starts:
        part = x[:, start : start + few]
        count = part.shape[1]
        rows = part.reshape(members, count * batch, inputs)
        made = memory[: count * step].view(members, count * batch, w_x.shape[2])
        if bias is None:
            torch.bmm(rows, w_x, out=made)
        else:
            torch.baddbmm(bias.unsqueeze(1), rows, w_x, out=made)
        steps = list(enumerate(made.view(members, count, batch, w_x.shape[2]).unbind(1), start))
        yield from reversed(steps) if reverse else steps


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a if b is None else b if a is None else a + b


def _rnn_steps(x: Tensor, h: Tensor, w_x: Tensor, w_h: Tensor, b_x: Tensor | None, b_h: Tensor | None, reverse: bool, act: str) -> Tensor:
    if act not in ("tanh", "relu"):
        raise ValueError(f"widepack: the activation {act!r} of a recurrent layer is unknown; known: tanh, relu")
    act_into = torch.ops.aten.tanh.out if act == "tanh" else torch.ops.aten.relu.out
    x, bias = _checked(x), _sum(b_x, b_h)
    y = _fake_steps(x, h)
    for block in _blocks(h, w_h):
        state, weight, outs = h[block], w_h[block], y[block].unbind(1)
        sums = x.new_empty(state.shape)
        for t, given in _steps(_given(x, block), w_x[block], _of(bias, block), reverse):
            torch.bmm(state, weight, out=sums).add_(given)
            state = act_into(sums, out=outs[t])
    return y


def _gru_steps(x: Tensor, h: Tensor, w_x: Tensor, w_h: Tensor, b_x: Tensor | None, b_h: Tensor | None, reverse: bool) -> Tensor:
    x, width = _checked(x), h.shape[2]
    bias, after = b_x, None
    if b_h is not None:  # of the new gate it stands behind the reset gate
        bias = _sum(b_x, torch.cat([b_h[:, : 2 * width], torch.zeros_like(b_h[:, 2 * width :])], 1))
        after = b_h[:, 2 * width :].unsqueeze(1)
    y = _fake_steps(x, h)
    for block in _blocks(h, w_h):
        state, weight, outs, add = h[block], w_h[block], y[block].unbind(1), _of(after, block)
        sums = x.new_empty(*state.shape[:2], 3 * width)
        gates = sums[..., : 2 * width]
        reset, update, hidden = sums.chunk(3, -1)
        new = x.new_empty(state.shape)
        for t, given in _steps(_given(x, block), w_x[block], _of(bias, block), reverse):
            torch.bmm(state, weight, out=sums)
            gates.add_(given[..., : 2 * width]).sigmoid_()
            if add is not None:
                hidden.add_(add)
            torch.addcmul(given[..., 2 * width :], reset, hidden, out=new).tanh_()
            state = torch.lerp(new, state, update, out=outs[t])
    return y


def _lstm_steps(
    x: Tensor, h: Tensor, c: Tensor, w_x: Tensor, w_h: Tensor, b_x: Tensor | None, b_h: Tensor | None, w_p: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor]:
    x, bias, width = _checked(x), _sum(b_x, b_h), c.shape[2]
    y, last = _fake_lstm(x, h, c)
    for block in _blocks(h, w_h):
        state, weight, outs, project = h[block], w_h[block], y[block].unbind(1), _of(w_p, block)
        cell = last[block].copy_(c[block])
        sums, seen = x.new_empty(*cell.shape[:2], 4 * width), x.new_empty(cell.shape)
        take, keep, new, out = sums.chunk(4, -1)
        first, bounded = sums[..., : 2 * width], torch.empty_like(seen)
        for t, given in _steps(_given(x, block), w_x[block], _of(bias, block), reverse):
            torch.bmm(state, weight, out=sums).add_(given)
            first.sigmoid_()
            out.sigmoid_()
            torch.tanh(new, out=bounded)
            cell.mul_(keep).addcmul_(take, bounded)
            torch.tanh(cell, out=seen)
            state = torch.mul(seen, out, out=outs[t]) if project is None else torch.bmm(seen.mul_(out), project, out=outs[t])
    return y, last


def _pack_lstm(w_x: Tensor, w_h: Tensor, reverse: bool, size: list[int]) -> list[Tensor]:
    pairs = [(a.t().contiguous(), b.t().contiguous()) for a, b in zip(w_x.unbind(0), w_h.unbind(0))]  # as torch has a member's
    if usable(w_x) and usable(w_h):
        units = w_h.shape[1]
        if w_x.dim() != 3 or w_x.shape[0] != len(w_h) or w_x.shape[2] != 4 * units or w_h.shape[2] != 4 * units:
            raise ValueError(f"weights of {list(w_x.shape)} and {list(w_h.shape)} are not those of an LSTM, [N, I, 4H] and [N, H, 4H]")
        if len(size) != 3 or size[2] != w_x.shape[1] or not all(0 < s < 2**31 for s in size):  # oneDNN reads what they say
            raise ValueError(f"an input of {size} is none of [T, B, {w_x.shape[1]}]")
        pairs = [torch.ops.mkldnn._reorder_mkldnn_rnn_layer_weight(a, b, w_h.shape[1], reverse, True, False, size) for a, b in pairs]
    return [a for a, _ in pairs] + [b for _, b in pairs]


def _packed_lstm(
    x: Tensor, h: Tensor, c: Tensor, weights: list[Tensor], b_x: Tensor | None, b_h: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor]:
    members = h.shape[0]
    w_x, w_h = weights[:members], weights[members:]
    if not w_x[0].is_mkldnn or x.shape[2] == 0:  # oneDNN takes no empty batch
        if w_x[0].is_mkldnn:
            return _fake_lstm(x, h, c)
        return _lstm_steps(x, h, c, torch.stack(w_x).transpose(1, 2), torch.stack(w_h).transpose(1, 2), b_x, b_h, None, reverse)
    x = _checked(x)
    y, last = _fake_lstm(x, h, c)
    if b_x is None or b_h is None:
        b_x = b_h = x.new_zeros(members, 4 * h.shape[2])
    xs = x.unbind(0) if x.shape[0] > 1 else [x[0]] * members
    for i, (hi, ci, bx, bh) in enumerate(
        zip(h.contiguous().unbind(0), c.contiguous().unbind(0), b_x.contiguous().unbind(0), b_h.contiguous().unbind(0))
    ):
        # 2: an LSTM; one layer, of one direction, time first, not training
        y[i], _, last[i], _ = torch.ops.aten.mkldnn_rnn_layer(
            xs[i], w_x[i], w_h[i], bx, bh, hi, ci, reverse, [], 2, h.shape[2], 1, True, False, False, False
        )
    return y, last


def _fake_steps(x: Tensor, h: Tensor, *_: Any) -> Tensor:
    return x.new_empty(h.shape[0], x.shape[1], x.shape[2], h.shape[2])


def _fake_lstm(x: Tensor, h: Tensor, c: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _fake_steps(x, h), c.new_empty(c.shape)


def _fake_pack_lstm(w_x: Tensor, w_h: Tensor, *_: Any) -> list[Tensor]:
    return [w.new_empty(w.shape[1], w.shape[0]) for many in (w_x, w_h) for w in many.unbind(0)]


define("rnn_steps(Tensor x, Tensor h, Tensor w_x, Tensor w_h, Tensor? b_x, Tensor? b_h, bool reverse, str act) -> Tensor", _rnn_steps, _fake_steps)
define("gru_steps(Tensor x, Tensor h, Tensor w_x, Tensor w_h, Tensor? b_x, Tensor? b_h, bool reverse) -> Tensor", _gru_steps, _fake_steps)
define(
    "lstm_steps(Tensor x, Tensor h, Tensor c, Tensor w_x, Tensor w_h, Tensor? b_x, Tensor? b_h, Tensor? w_p, bool reverse) -> (Tensor, Tensor)",
    _lstm_steps,
    _fake_lstm,
)
define("pack_lstm(Tensor w_x, Tensor w_h, bool reverse, int[] size) -> Tensor[]", _pack_lstm, _fake_pack_lstm)
define(
    "packed_lstm(Tensor x, Tensor h, Tensor c, Tensor[] weights, Tensor? b_x, Tensor? b_h, bool reverse) -> (Tensor, Tensor)",
    _packed_lstm,
    _fake_lstm,
)


def members(node: Node, count: int, packs: dict[str, Node]) -> tuple[list[Node], Ref, Ref | None]:
    """A node of one of `OPS` as ATen's op once a member. count: of members. packs: nodes of `pack_lstm` by name.

    Returns: the nodes, the name of y, that of an LSTM's last c.
    """
    made: list[Node] = []

    def add(op: str, *args: Any) -> Ref:
        made.append(Node(f"{node.name}__{len(made)}", op, args, {}, "", node.source, node.member))
        return Ref(made[-1].name)

    def each(value: Any) -> list[Ref]:
        parts = add("aten.unbind.int", value, 0)
        return [add("operator.getitem", parts, i) for i in range(count)]

    kind = OPS.index(node.op)
    op = (f"aten.rnn_{node.args[7] if kind == 0 else ''}.input", "aten.gru.input", "aten.lstm.input", "aten.lstm.input")[kind]
    x, states = node.args[0], node.args[1 : 2 + (kind > 1)]
    if kind == 3:
        pack = packs[node.args[3].name].args
        w_x, w_h, b_x, b_h, w_p, reverse = pack[0], pack[1], node.args[4], node.args[5], None, node.args[6]
    else:
        w_x, w_h, b_x, b_h = node.args[1 + len(states) : 5 + len(states)]
        w_p, reverse = (node.args[7], node.args[8]) if kind == 2 else (None, node.args[6])
    if reverse:
        x = add("aten.flip.default", x, [1])
    xs = each(add("aten.expand.default", x, [count, -1, -1, -1]))
    hs = [each(add("aten.unsqueeze.default", s, 1)) for s in states]
    weights = [each(add("aten.transpose.int", w, 1, 2)) for w in (w_x, w_h)]
    biases = [each(b) for b in (b_x, b_h) if b is not None]
    more = [] if w_p is None else [each(add("aten.transpose.int", w_p, 1, 2))]
    runs = []
    for i in range(count):
        own, state = [p[i] for p in (*weights, *biases, *more)], [s[i] for s in hs]
        runs.append(add(op, xs[i], state if kind > 1 else state[0], own, bool(biases), 1, 0.0, False, False, False))
    y = add("aten.stack.default", [add("operator.getitem", r, 0) for r in runs])
    if reverse:
        y = add("aten.flip.default", y, [1])
    if kind < 2:
        made[-1] = replace(made[-1], name=node.name, out=node.out)
        return made, Ref(node.name), None
    last = add("aten.squeeze.dim", add("aten.stack.default", [add("operator.getitem", r, 2) for r in runs]), 1)
    return made, y, last
