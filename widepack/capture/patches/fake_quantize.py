"""Writes fake quantization with its scales in tensors as plain ops, while a member is exported.

torch has no sizes for these ops in an export, and the one that also observes counts as a write whether or
not its observer is on. With the observer off:

    q = clamp(round(x / scale) + zero_point, quant_min, quant_max)    y = (q - zero_point) * scale

The derivative is 1 where the clamp changes nothing, and 0 elsewhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_FAR = 2.0**63  # torch converts larger numbers of a channel to the lowest one


def per_tensor(input: Tensor, scale: Any, zero_point: Any, quant_min: int, quant_max: int) -> Any:
    """`fake_quantize_per_tensor_affine`."""
    if not _written(scale, zero_point):
        return _PER_TENSOR(input, scale, zero_point, quant_min, quant_max)
    scale, zero_point = scale.reshape(()), zero_point.reshape(())
    rounded = torch.round(input * (1 / scale))
    rounded = torch.where(rounded.isnan(), -torch.inf, rounded)
    return _quantized(input, rounded, scale, zero_point, (quant_min, quant_max))


def per_channel(
    input: Tensor, scale: Tensor, zero_point: Tensor, axis: int, quant_min: int, quant_max: int
) -> Any:
    """`fake_quantize_per_channel_affine`."""
    if not _written(scale, zero_point):
        return _PER_CHANNEL(input, scale, zero_point, axis, quant_min, quant_max)
    shape = [-1 if d == axis else 1 for d in range(input.ndim)]
    scale, zero_point = scale.reshape(shape), zero_point.reshape(shape)
    rounded = torch.round(input * (1 / scale))
    rounded = torch.where(rounded.abs() < _FAR, rounded, -torch.inf)
    return _quantized(input, rounded, scale.to(input.dtype), zero_point, (quant_min, quant_max))


def _written(scale: Any, zero_point: Any) -> bool:
    tensors = isinstance(scale, Tensor) and isinstance(zero_point, Tensor)
    return tensors and zero_point.dtype in (torch.int32, torch.int64)


def _quantized(
    x: Tensor, rounded: Tensor, scale: Tensor, zero_point: Tensor, bounds: tuple[int, int]
) -> Tensor:
    """Returns the answer of rounded quotients. Its product has the dtype of the scale."""
    low, high = bounds
    found = rounded + zero_point
    steps = found.clamp(low, high) - zero_point
    y = (steps.to(scale.dtype) * scale).to(x.dtype).detach()
    passed = torch.where((found >= low) & (found <= high), x, 0)
    return y + (passed - passed.detach())  # a zero that has the derivative


def _observing(
    input: Tensor, observer_on: Tensor, fake_quant_on: Tensor, running_min: Tensor, running_max: Tensor,
    scale: Tensor, zero_point: Tensor, averaging_const: float, quant_min: int, quant_max: int, ch_axis: int,
    per_row_fake_quant: bool = False, symmetric_quant: bool = False,
) -> Any:  # fmt: skip
    """`fused_moving_avg_obs_fake_quant`. The flags are values of the member."""
    if observer_on[0] == 1:
        return _OBSERVING(
            input, observer_on, fake_quant_on, running_min, running_max, scale, zero_point,
            averaging_const, quant_min, quant_max, ch_axis, per_row_fake_quant, symmetric_quant,
        )  # fmt: skip
    if fake_quant_on[0] != 1:
        return input
    if per_row_fake_quant:
        return per_channel(input, scale, zero_point, ch_axis, quant_min, quant_max)
    return per_tensor(input, scale, zero_point, quant_min, quant_max)


REPLACEMENTS = {
    (torch, "fake_quantize_per_tensor_affine"): per_tensor,
    (torch, "fake_quantize_per_channel_affine"): per_channel,
    (torch, "fused_moving_avg_obs_fake_quant"): _observing,
}
"""What stands in the place of torch's functions during an export."""
_PER_TENSOR, _PER_CHANNEL, _OBSERVING = (getattr(*place) for place in REPLACEMENTS)
