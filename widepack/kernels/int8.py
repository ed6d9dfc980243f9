"""Defines the ops of linear layers whose weights are int8, with one scale for each row of a weight.

    int8_scales(weight) -> [N, O]                weight: [N, O, I], float32
    int8_weight(weight, scales) -> [N*I, O+8]    the int8 numbers in the order in which `int8_linear` reads
    int8_linear(x, weight, scales, bias) -> [N, R, O]
    x: [N, R, I], or [1, R, I] for all members   bias: [N, O] or none

An int8 number is `q = round(w / scale)`, from -127 to 127, where `scale` is the largest `|w|` of the row
divided by 127. So `|w - q * scale|` is at most half of the scale, apart from the rounding of `w / scale`
(1e-5 of the scale). A row that has NaN or inf gets the scale NaN, and its output is NaN.

`int8_linear` computes `(x @ q^T) * scale + bias` in float32. A member's product is a sum of rows of `q^T`,
each times a number of x. torch's `embedding_bag` of 8-bit rows computes such sums for all members in one
call, and reads a quarter of the bytes of float32 weights. Each row of x is computed by itself, so its answer
does not depend on other rows or on the number of threads.

Only loaded programs use these ops, and only on a CPU. No file may contain them.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from .checks.require import LARGEST, dense, for_members, of_shape, require
from .library import own_op

SCALES = "widepack.int8_scales.default"
WEIGHT = "widepack.int8_weight.default"
LINEAR = "widepack.int8_linear.default"
OPS = frozenset({SCALES, WEIGHT, LINEAR})
"""The names of the ops in programs."""

TAIL = 8
"""The bytes at the end of each row of an int8 weight: a factor and a summand, both float32."""
_MOST = 127  # the largest int8 number that is used
_SHIFT = 128  # numbers are stored as unsigned bytes, larger by this


def _float32(name: str, x: Tensor, rank: int) -> Tensor:
    """Returns a float32 tensor of the CPU. Raises OperandError for others."""
    dense(name, x, rank)
    require(x.dtype is torch.float32, f"{name} is {x.dtype}; float32 is needed")
    require(x.device.type in ("cpu", "meta"), f"{name} is on {x.device}; the CPU is needed")
    return x


@own_op("int8_scales(Tensor weight) -> Tensor", lambda weight: weight.new_empty(weight.shape[:2]))
def _int8_scales(weight: Tensor) -> Tensor:
    require(_float32("weight", weight, 3).shape[2] > 0, "weight has no inputs")
    largest = torch.maximum(weight.amax(2), -weight.amin(2)).abs()  # a fifth of the time of weight.abs()
    scales = largest / _MOST
    # The quotient may be rounded down, for denormal numbers by much: then 127 scales would not reach.
    short = scales * _MOST < largest
    scales = torch.where(short, torch.nextafter(scales, torch.full_like(scales, torch.inf)), scales)
    return torch.where(torch.isfinite(largest), scales, torch.nan)


def _fake_weight(weight: Tensor, scales: Tensor) -> Tensor:
    members, outputs, inputs = weight.shape
    return weight.new_empty((members * inputs, outputs + TAIL), dtype=torch.uint8)


@own_op("int8_weight(Tensor weight, Tensor scales) -> Tensor", _fake_weight)
def _int8_weight(weight: Tensor, scales: Tensor) -> Tensor:
    members, outputs, inputs = _float32("weight", weight, 3).shape
    of_shape("scales", scales, [members, outputs], weight)
    table = torch.empty((members, inputs, outputs + TAIL), dtype=torch.uint8)
    for member, (numbers, steps) in enumerate(zip(weight, scales)):  # one at a time: less memory
        steps = torch.where(steps > 0, steps, 1.0).unsqueeze(1)  # a row of zeros, or of NaN
        q = (numbers / steps).round_().nan_to_num_(0.0).clamp_(-_MOST, _MOST)
        table[member, :, :outputs] = q.add_(_SHIFT).to(torch.uint8).t()
    # Each row ends with what torch multiplies its bytes by, and then adds to them.
    table[:, :, outputs:] = torch.tensor([1.0, -float(_SHIFT)]).view(torch.uint8)
    return table.view(members * inputs, outputs + TAIL)


@cache
def _bags() -> Any:
    """Returns torch's op for sums of 8-bit rows. It is looked up when it is first needed."""
    return torch.ops.quantized.embedding_bag_byte_rowwise_offsets.default


@lru_cache(maxsize=32)
def _places(members: int, rows: int, inputs: int) -> tuple[Tensor, Tensor]:
    """Returns the rows of the table that each sum takes, and where each sum's rows begin."""
    dtype = torch.int32 if members * rows * inputs <= LARGEST else torch.int64
    with torch.inference_mode(False):  # the cache serves calls outside of inference mode too
        of_members = torch.arange(members * inputs, dtype=dtype).view(members, 1, inputs)
        starts = torch.arange(0, members * rows * inputs, inputs, dtype=dtype)
        return of_members.expand(members, rows, inputs).reshape(-1).contiguous(), starts


@own_op(
    "int8_linear(Tensor x, Tensor weight, Tensor scales, Tensor? bias) -> Tensor",
    lambda x, _, scales, bias: x.new_empty((scales.shape[0], x.shape[1], scales.shape[1])),
)
def _int8_linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    members, outputs = _float32("scales", scales, 2).shape
    rows, inputs = _float32("x", x, 3).shape[1:]
    for_members("x", x, members, [rows, inputs], scales)
    of_shape("weight", weight, [members * inputs, outputs + TAIL])
    require(weight.dtype is torch.uint8, f"weight is {weight.dtype}; uint8 is needed")
    require(weight.device == x.device, f"weight is on {weight.device}; x is on {x.device}")
    require(weight.is_contiguous(), "weight has gaps in its memory")
    of_shape("bias", bias, [members, outputs], scales)
    if not members * rows * outputs * inputs:
        y = x.new_zeros((members, rows, outputs))
    else:
        places, starts = _places(members, rows, inputs)
        # A reshape may be a view with gaps, which the kernel would read past its end.
        numbers = x.expand(members, -1, -1).reshape(-1).contiguous()
        y = _bags()(weight, places, starts, False, 0, False, numbers).view(members, rows, outputs)
    steps = scales.unsqueeze(1)
    return y.mul_(steps) if bias is None else torch.addcmul(bias.unsqueeze(1), y, steps)
