"""Defines recurrent ops that have derivatives: one layer over all steps, for all members that train.

| op | what it computes |
|---|---|
| `rnn_training(x, h, w_x, w_h, b_x, b_h, act)` | h' = act(x W_x + b_x + h W_h + b_h) -> y |
| `gru_training(x, h, w_x, w_h, b_x, b_h)` | with the gates of `aten.gru` -> (y, gates) |
| `lstm_training(x, h, c, w_x, w_h, b_x, b_h)` | with the gates of `aten.lstm` -> (y, last c, gates, cells) |

    x: [N, T, B, I], or [1, T, B, I] for all members   w_x: [N, I, G*H]   w_h: [N, H, G*H]
    b_x, b_h: [N, G*H] or none   h, c: [N, B, H]   y, cells: [N, T, B, H]   gates: [N, T, B, 4*H]
    seen: tanh of the cells

A step is one batched product of all members. Gates, cells and their tanh are kept for the backward pass,
which needs one batched product for each step too. The gradients of the weights are one batched product over
all steps. Derivatives of these derivatives are those of the same layers in ops of torch (`_plain_rnn`, ...).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .library import differentiable_by, differentiate, own_op
from .member_products import multiply
from .recurrent import check_layer, require_activation, sum_of


def _projected(x: Tensor, w_x: Tensor, bias: Tensor | None) -> Tensor:
    """Returns the products of all steps with the weights of x, `[N, T, B, G*H]`."""
    if x.shape[1] == 0:
        raise RuntimeError("Expected sequence length to be larger than 0 in RNN")
    rows = x.expand(w_x.shape[0], -1, -1, -1).flatten(1, 2)
    return multiply(rows, w_x.mT, bias).view(w_x.shape[0], *x.shape[1:3], w_x.shape[2])


_of_sigmoid = torch.ops.aten.sigmoid_backward.grad_input  # (g, s, out): g s (1 - s), s: the sigmoid
_of_tanh = torch.ops.aten.tanh_backward.grad_input  # (g, t, out): g (1 - t^2), t: the tanh


def _before(first: Tensor, states: Tensor) -> Tensor:
    """Returns what each step started from, `[N, T, B, H]`."""
    return torch.cat([first.unsqueeze(1), states[:, :-1]], 1)


def _fake_rnn(x: Tensor, h: Tensor, *_: Any) -> Tensor:
    return x.new_empty(h.shape[0], x.shape[1], x.shape[2], h.shape[2])


def _fake_gru(x: Tensor, h: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _fake_rnn(x, h), x.new_zeros(h.shape[0], x.shape[1], x.shape[2], 4 * h.shape[2])


def _fake_lstm(x: Tensor, h: Tensor, c: Tensor, *_: Any) -> tuple[Tensor, ...]:
    y, gates = _fake_gru(x, h)
    return y, c.new_empty(c.shape), gates, torch.empty_like(y), torch.empty_like(y)


@own_op(
    "rnn_training(Tensor x, Tensor h, Tensor w_x, Tensor w_h, Tensor? b_x, Tensor? b_h, str act) -> Tensor",
    _fake_rnn,
)
def _rnn_training(
    x: Tensor, h: Tensor, w_x: Tensor, w_h: Tensor, b_x: Tensor | None, b_h: Tensor | None, act: str
) -> Tensor:
    check_layer(1, x, h, w_x, w_h, b_x, b_h)
    require_activation(act)
    y = _projected(x, w_x, sum_of(b_x, b_h))
    for step in y.unbind(1):
        step.add_(torch.bmm(h, w_h))
        h = step.tanh_() if act == "tanh" else step.relu_()
    return y


@own_op(
    "gru_training(Tensor x, Tensor h, Tensor w_x, Tensor w_h, Tensor? b_x, Tensor? b_h) -> (Tensor, Tensor)",
    _fake_gru,
)
def _gru_training(
    x: Tensor, h: Tensor, w_x: Tensor, w_h: Tensor, b_x: Tensor | None, b_h: Tensor | None
) -> tuple[Tensor, Tensor]:
    check_layer(3, x, h, w_x, w_h, b_x, b_h)
    projected, width = _projected(x, w_x, b_x), h.shape[2]
    y, gates = _fake_gru(x, h)
    for t, given in enumerate(projected.unbind(1)):
        hidden = torch.bmm(h, w_h) if b_h is None else torch.baddbmm(b_h.unsqueeze(1), h, w_h)
        kept = gates[:, t]
        torch.add(given[..., : 2 * width], hidden[..., : 2 * width], out=kept[..., : 2 * width])
        reset, update, new, last = kept.sigmoid_().chunk(4, -1)
        last.copy_(hidden[..., 2 * width :])
        torch.addcmul(given[..., 2 * width :], reset, last, out=new).tanh_()
        h = torch.lerp(new, h, update, out=y[:, t])
    return y, gates


@own_op(
    "lstm_training(Tensor x, Tensor h, Tensor c, Tensor w_x, Tensor w_h, Tensor? b_x, Tensor? b_h)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_lstm,
)
def _lstm_training(
    x: Tensor, h: Tensor, c: Tensor, w_x: Tensor, w_h: Tensor, b_x: Tensor | None, b_h: Tensor | None
) -> tuple[Tensor, ...]:
    check_layer(4, x, h, w_x, w_h, b_x, b_h, c)
    gates, width = _projected(x, w_x, sum_of(b_x, b_h)), c.shape[2]
    y, cells, seen = (x.new_empty(*gates.shape[:3], width) for _ in range(3))
    for t, gate in enumerate(gates.unbind(1)):
        gate.add_(torch.bmm(h, w_h))
        take, keep, new, out = gate.chunk(4, -1)
        gate[..., : 2 * width].sigmoid_()
        new.tanh_()
        out.sigmoid_()
        c = torch.mul(keep, c, out=cells[:, t]).addcmul_(take, new)
        h = torch.mul(out, torch.tanh(c, out=seen[:, t]), out=y[:, t])
    return y, c.clone(), gates, cells, seen


def _plain_projected(x: Tensor, w_x: Tensor, bias: Tensor | None) -> Tensor:
    """Returns the products of all steps with the weights of x, `[N, T, B, G*H]`."""
    y = torch.matmul(x, w_x.unsqueeze(1))
    return y if bias is None else y + bias[:, None, None]


def _hidden(h: Tensor, w_h: Tensor, bias: Tensor | None) -> Tensor:
    y = torch.bmm(h, w_h)
    return y if bias is None else y + bias.unsqueeze(1)


def _plain_rnn(
    ctx: Any, x: Tensor, h: Tensor, w_x: Tensor, w_h: Tensor, b_x: Tensor | None, b_h: Tensor | None
) -> tuple[Tensor, ...]:
    """Returns the states of all steps. ctx.act: the activation."""
    states = []
    for given in _plain_projected(x, w_x, b_x).unbind(1):
        total = given + _hidden(h, w_h, b_h)
        h = total.tanh() if ctx.act == "tanh" else total.relu()
        states.append(h)
    return (torch.stack(states, 1),)


def _plain_gru(
    ctx: Any, x: Tensor, h: Tensor, w_x: Tensor, w_h: Tensor, b_x: Tensor | None, b_h: Tensor | None
) -> tuple[Tensor, ...]:
    """Returns the states of all steps."""
    states = []
    for given in _plain_projected(x, w_x, b_x).unbind(1):
        of_x, of_h = given.chunk(3, -1), _hidden(h, w_h, b_h).chunk(3, -1)
        reset, update = (of_x[0] + of_h[0]).sigmoid(), (of_x[1] + of_h[1]).sigmoid()
        new = (of_x[2] + reset * of_h[2]).tanh()
        h = new + update * (h - new)
        states.append(h)
    return (torch.stack(states, 1),)


def _plain_lstm(
    ctx: Any,
    x: Tensor,
    h: Tensor,
    c: Tensor,
    w_x: Tensor,
    w_h: Tensor,
    b_x: Tensor | None,
    b_h: Tensor | None,
) -> tuple[Tensor, ...]:
    """Returns the states of all steps, and the last cells."""
    states = []
    for given in _plain_projected(x, w_x, b_x).unbind(1):
        take, keep, new, out = (given + _hidden(h, w_h, b_h)).chunk(4, -1)
        c = keep.sigmoid() * c + take.sigmoid() * new.tanh()
        h = out.sigmoid() * c.tanh()
        states.append(h)
    return torch.stack(states, 1), c


def _of_weights(
    needed: bool, x: Tensor, before: Tensor, w_x: Tensor, of_x: Tensor, of_h: Tensor
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Returns the gradients of x, w_x and w_h, from those of the sums of all steps, `[N, T, B, G*H]`.

    needed: whether x needs a gradient.
    """
    rows, sums = x.expand(w_x.shape[0], -1, -1, -1).flatten(1, 2), of_x.flatten(1, 2)
    gradient = multiply(sums, w_x, None).view(w_x.shape[0], *x.shape[1:]) if needed else None
    if gradient is not None and x.shape[0] == 1 < gradient.shape[0]:
        gradient = gradient.sum(0, keepdim=True)
    states, of_states = before.flatten(1, 2), of_h.flatten(1, 2)
    return gradient, multiply(rows.mT, sums.mT, None), multiply(states.mT, of_states.mT, None)


def _of_bias(bias: Tensor | None, sums: Tensor) -> Tensor | None:
    return None if bias is None else sums.sum((1, 2))


def _keep_rnn(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.act = inputs
    ctx.save_for_backward(*tensors, output)


@differentiable_by(_plain_rnn, 6)
def _rnn_backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    x, h, w_x, w_h, b_x, b_h, y = ctx.saved_tensors
    sums, carried = torch.empty_like(y), torch.zeros_like(h)
    for t in reversed(range(y.shape[1])):
        arrived, step = carried.add_(gradient[:, t]), sums[:, t]
        if ctx.act == "tanh":
            _of_tanh(arrived, y[:, t], grad_input=step)
        else:
            torch.mul(arrived, y[:, t] > 0, out=step)
        carried = torch.bmm(step, w_h.mT)
    of_x, of_wx, of_wh = _of_weights(ctx.needs_input_grad[0], x, _before(h, y), w_x, sums, sums)
    return of_x, carried, of_wx, of_wh, _of_bias(b_x, sums), _of_bias(b_h, sums), None


def _keep_gru(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # no zeros for what has no gradient


@differentiable_by(_plain_gru, 6)
def _gru_backward(ctx: Any, gradient: Tensor | None, _: Any) -> tuple[Any, ...]:
    x, h, w_x, w_h, b_x, b_h, y, gates = ctx.saved_tensors
    if gradient is None:
        return (None,) * 6
    width, before = h.shape[2], _before(h, y)
    reset, update, new, hidden = gates.chunk(4, -1)
    to_new, to_update, to_reset = (torch.empty_like(y) for _ in range(3))
    _of_tanh(1 - update, new, grad_input=to_new)
    _of_sigmoid(before - new, update, grad_input=to_update)
    _of_sigmoid(hidden, reset, grad_input=to_reset)
    of_h, of_x = (y.new_empty(*y.shape[:3], 3 * width) for _ in range(2))
    carried = torch.zeros_like(h)
    for t in reversed(range(y.shape[1])):
        arrived = carried.add_(gradient[:, t])
        step, given = of_h[:, t], of_x[:, t]
        of_new = torch.mul(arrived, to_new[:, t], out=given[..., 2 * width :])
        torch.mul(of_new, to_reset[:, t], out=step[..., :width])
        torch.mul(arrived, to_update[:, t], out=step[..., width : 2 * width])
        torch.mul(of_new, reset[:, t], out=step[..., 2 * width :])
        given[..., : 2 * width] = step[..., : 2 * width]
        carried = torch.baddbmm(arrived * update[:, t], step, w_h.mT)
    gradients = _of_weights(ctx.needs_input_grad[0], x, before, w_x, of_x, of_h)
    return gradients[0], carried, *gradients[1:], _of_bias(b_x, of_x), _of_bias(b_h, of_h)


def _keep_lstm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    y, _, *kept = output
    ctx.save_for_backward(*inputs, y, *kept)
    ctx.mark_non_differentiable(*kept)
    ctx.set_materialize_grads(False)  # no zeros for what has no gradient


@differentiable_by(_plain_lstm, 7)
def _lstm_backward(ctx: Any, gradient: Tensor | None, of_last: Tensor | None, *_: Any) -> tuple[Any, ...]:
    x, h, c, w_x, w_h, b_x, b_h, y, gates, cells, seen = ctx.saved_tensors
    width = c.shape[2]
    if gradient is None and of_last is None:
        return (None,) * 7
    take, keep, new, out = gates.chunk(4, -1)
    slopes = torch.empty_like(gates)  # of the sums inside of the gates, before what arrives at a step
    _of_sigmoid(new, take, grad_input=slopes[..., :width])
    _of_sigmoid(_before(c, cells), keep, grad_input=slopes[..., width : 2 * width])
    _of_tanh(take, new, grad_input=slopes[..., 2 * width : 3 * width])
    _of_sigmoid(seen, out, grad_input=slopes[..., 3 * width :])
    to_cell = torch.empty_like(cells)
    _of_tanh(out, seen, grad_input=to_cell)
    sums, carried = torch.empty_like(gates), torch.zeros_like(h)
    of_cell = torch.zeros_like(c) if of_last is None else of_last.clone()
    for t in reversed(range(y.shape[1])):
        arrived = carried if gradient is None else carried.add_(gradient[:, t])
        of_cell.addcmul_(arrived, to_cell[:, t])
        step, slope = sums[:, t], slopes[:, t]
        parts = step[..., : 3 * width].view(*step.shape[:2], 3, width)
        torch.mul(slope[..., : 3 * width].view(parts.shape), of_cell.unsqueeze(-2), out=parts)
        torch.mul(slope[..., 3 * width :], arrived, out=step[..., 3 * width :])
        carried = torch.bmm(step, w_h.mT)
        of_cell.mul_(keep[:, t])
    of_x, of_wx, of_wh = _of_weights(ctx.needs_input_grad[0], x, _before(h, y), w_x, sums, sums)
    return of_x, carried, of_cell, of_wx, of_wh, _of_bias(b_x, sums), _of_bias(b_h, sums)


differentiate("rnn_training", _keep_rnn, _rnn_backward)
differentiate("gru_training", _keep_gru, _gru_backward)
differentiate("lstm_training", _keep_lstm, _lstm_backward)
