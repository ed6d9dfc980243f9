"""The recurrent ops that train, in ops of torch: for derivatives of their derivatives.

The operands are those of `recurrent_training.py`. Each function takes the context of a backward pass first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _projected(x: Tensor, w_x: Tensor, bias: Tensor | None) -> Tensor:
    """Returns the products of all steps with the weights of x, `[N, T, B, G*H]`."""
    y = torch.matmul(x, w_x.unsqueeze(1))
    return y if bias is None else y + bias[:, None, None]


def _hidden(h: Tensor, w_h: Tensor, bias: Tensor | None) -> Tensor:
    y = torch.bmm(h, w_h)
    return y if bias is None else y + bias.unsqueeze(1)


def rnn(
    ctx: Any, x: Tensor, h: Tensor, w_x: Tensor, w_h: Tensor, b_x: Tensor | None, b_h: Tensor | None
) -> tuple[Tensor, ...]:
    """Returns the states of all steps. ctx.act: the activation."""
    states = []
    for given in _projected(x, w_x, b_x).unbind(1):
        total = given + _hidden(h, w_h, b_h)
        h = total.tanh() if ctx.act == "tanh" else total.relu()
        states.append(h)
    return (torch.stack(states, 1),)


def gru(
    ctx: Any, x: Tensor, h: Tensor, w_x: Tensor, w_h: Tensor, b_x: Tensor | None, b_h: Tensor | None
) -> tuple[Tensor, ...]:
    """Returns the states of all steps."""
    states = []
    for given in _projected(x, w_x, b_x).unbind(1):
        of_x, of_h = given.chunk(3, -1), _hidden(h, w_h, b_h).chunk(3, -1)
        reset, update = (of_x[0] + of_h[0]).sigmoid(), (of_x[1] + of_h[1]).sigmoid()
        new = (of_x[2] + reset * of_h[2]).tanh()
        h = new + update * (h - new)
        states.append(h)
    return (torch.stack(states, 1),)


def lstm(
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
    for given in _projected(x, w_x, b_x).unbind(1):
        take, keep, new, out = (given + _hidden(h, w_h, b_h)).chunk(4, -1)
        c = keep.sigmoid() * c + take.sigmoid() * new.tanh()
        h = out.sigmoid() * c.tanh()
        states.append(h)
    return torch.stack(states, 1), c
