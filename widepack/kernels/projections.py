"""Computes the products of a recurrent layer's inputs with their weights, for many steps at once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def projected_parts(
    x: Tensor, w_x: Tensor, bias: Tensor | None, reverse: bool, most_bytes: int
) -> Iterator[tuple[int, Tensor]]:
    """Yields (first step, x W_x + bias of some steps: [n, count, B, G*H]), with the last steps first if
    `reverse`.

    A yielded tensor is valid until the next one is requested.

    Args:
        x: The input, `[n, T, B, I]`.
        w_x: The weights, `[n, I, G*H]`.
        bias: `[n, G*H]`, or None.
        reverse: Whether the layer runs from the last step to the first.
        most_bytes: The bytes that the products of some steps may take.
    """
    members, total, batch, inputs = x.shape
    step = members * batch * w_x.shape[2]
    few = min(total, max(1, most_bytes // max(1, step * x.element_size())))
    memory = x.new_empty(few * step)
    starts = range(0, total, few)
    for start in reversed(starts) if reverse else starts:
        part = x[:, start : start + few]
        count = part.shape[1]
        rows = part.reshape(members, count * batch, inputs)
        products = memory[: count * step].view(members, count * batch, w_x.shape[2])
        if bias is None:
            torch.bmm(rows, w_x, out=products)
        else:
            torch.baddbmm(bias.unsqueeze(1), rows, w_x, out=products)
        yield start, products.view(members, count, batch, w_x.shape[2])
