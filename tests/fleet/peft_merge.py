"""Merges an adapter into a weight as PEFT's merge_and_unload does, for comparisons bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from widepack.fleet.adapter import LoraDelta, is_transposed


def merged(base: Tensor, delta: LoraDelta, dtype: torch.dtype | None = None) -> Tensor:
    """Returns a weight with its delta, as `merge_and_unload` of PEFT gives it.

    The difference is computed in float32, or float64 if the factors are, added, and rounded once; that of an
    embedding is rounded before and after.

    Args:
        base: The weight of the base model.
        delta: Of this weight.
        dtype: In which the base model is loaded; None for that of `base`.

    Returns: the weight, in the dtype.

    Raises:
        CheckpointError: The delta is of another shape than the base.
    """
    weight = base if dtype is None else base.to(dtype)
    rows, columns = delta.left.shape[0], delta.right.shape[1]
    transposed = is_transposed(weight, delta)
    difference = _wide(delta.left) @ _wide(delta.right)
    if transposed:
        difference = difference.t()
    difference = (difference * delta.scale).reshape(weight.shape)
    if delta.magnitude is None:
        result = weight.clone()
        result += difference.to(weight.dtype) if delta.embedding else difference
        return result
    full = weight + difference
    matrix = full.t() if transposed else full.reshape(rows, columns)
    factor = _wide(delta.magnitude) / torch.linalg.norm(matrix, dim=1)
    shape = (1, rows) if transposed else (rows, *[1] * (weight.ndim - 1))
    scaled: Tensor = factor.reshape(shape) * full
    return scaled.to(weight.dtype)


def _wide(values: Tensor) -> Tensor:
    """Returns a tensor in float32 at least, as PEFT loads adapters."""
    return values if values.dtype == torch.float64 else values.float()
