"""Gives the backward pass of an op derivatives of its own, for derivatives of derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Backward = Callable[..., tuple[Any, ...]]


def differentiable_by(plain: Callable[..., tuple[Tensor, ...]], count: int) -> Callable[[Backward], Backward]:
    """Decorates a backward pass that writes in place, so that `create_graph=True` gives a right graph.

    With `create_graph`, autograd differentiates `plain` instead: slower, and with derivatives of any order.
    Without a graph of its own, the backward pass would give a second derivative of zero, silently.

    Args:
        plain: Computes the op's outputs that have derivatives: `plain(ctx, *inputs)`.
        count: The number of inputs, the first of the saved tensors.
    """

    def decorate(backward: Backward) -> Backward:
        def either(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
            if not torch.is_grad_enabled():
                return backward(ctx, *gradients)
            # new nodes of the graph, so that no derivative flows from one input to another
            inputs = [t if t is None else t.view_as(t) for t in ctx.saved_tensors[:count]]
            arrived = [(y, g) for y, g in zip(plain(ctx, *inputs), gradients) if g is not None]
            needed = ctx.needs_input_grad
            wanted = [t for t, is_needed in zip(inputs, needed) if is_needed and t is not None]
            if not arrived or not wanted:
                return (None,) * len(needed)
            ys, gs = zip(*arrived)
            found = iter(torch.autograd.grad(ys, wanted, gs, create_graph=True, allow_unused=True))
            return tuple(next(found) if is_needed else None for is_needed in needed)

        return either

    return decorate
