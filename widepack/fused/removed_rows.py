"""Removes members' rows from a parameter or buffer, which stays the same object."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


def keep_rows(tensor: torch.Tensor, rows: Sequence[int]) -> None:
    """Keeps some rows of a parameter or buffer, and of its gradient.

    A backward pass of a call before the removal is refused by torch, because the weights have changed.

    Args:
        tensor: `[N, ...]`.
        rows: The numbers of the rows that stay.
    """
    kept = list(rows)
    torch.clear_autocast_cache()  # it has copies of the weights in another dtype
    with torch.inference_mode(False), torch.no_grad():
        values = tensor.detach()[kept]
        tensor[:0].zero_()  # counts as a write
        if isinstance(tensor, nn.Parameter):
            gradient = None if tensor.grad is None else tensor.grad.detach()[kept]
            tensor.grad = None
            # torch keeps the node that accumulates the gradient, which expects the shape of before, until
            # the dtype changes
            other = torch.float32 if tensor.dtype != torch.float32 else torch.float64
            tensor.data = torch.empty(0, dtype=other, device=tensor.device)
            tensor.data = values
            tensor.grad = gradient
        else:
            tensor.data = values
