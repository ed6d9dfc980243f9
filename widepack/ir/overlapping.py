"""Writes into tensors whose elements share memory (`torch.Tensor.expand`), which torch refuses."""

from __future__ import annotations

import torch


def overlaps(value: torch.Tensor) -> bool:
    """Returns whether elements of a tensor share memory along a dim."""
    return value.layout == torch.strided and any(
        step == 0 and size > 1 for step, size in zip(value.stride(), value.shape)
    )


def copy_into(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copies a value of the same shape into a tensor. Along a dim that shares memory, the first element
    counts.
    """
    if overlaps(target):
        for dim, (step, size) in enumerate(zip(target.stride(), target.shape)):
            if step == 0 and size > 1:
                target, value = target.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    target.copy_(value)
