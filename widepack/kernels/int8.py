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

from .checks import int8 as checks
from .checks.int8 import TAIL as TAIL
from .checks.require import LARGEST
from .library import define

SCALES = "widepack.int8_scales.default"
WEIGHT = "widepack.int8_weight.default"
LINEAR = "widepack.int8_linear.default"
OPS = frozenset({SCALES, WEIGHT, LINEAR})
"""The names of the ops in programs."""

_MOST = 127  # the largest int8 number that is used
_SHIFT = 128  # numbers are stored as unsigned bytes, larger by this


def _int8_scales(weight: Tensor) -> Tensor:
    largest = torch.maximum(weight.amax(2), -weight.amin(2)).abs()  # a fifth of the time of weight.abs()
    scales = largest / _MOST
    # The quotient may be rounded down, for denormal numbers by much: then 127 scales would not reach.
    short = scales * _MOST < largest
    scales = torch.where(short, torch.nextafter(scales, torch.full_like(scales, torch.inf)), scales)
    return torch.where(torch.isfinite(largest), scales, torch.nan)


def _fake_scales(weight: Tensor) -> Tensor:
    return weight.new_empty(weight.shape[:2])


def _int8_weight(weight: Tensor, scales: Tensor) -> Tensor:
    members, outputs, inputs = weight.shape
    table = torch.empty((members, inputs, outputs + TAIL), dtype=torch.uint8)
    for member, (numbers, steps) in enumerate(zip(weight, scales)):  # one at a time: less memory
        steps = torch.where(steps > 0, steps, 1.0).unsqueeze(1)  # a row of zeros, or of NaN
        q = (numbers / steps).round_().nan_to_num_(0.0).clamp_(-_MOST, _MOST)
        table[member, :, :outputs] = q.add_(_SHIFT).to(torch.uint8).t()
    # Each row ends with what torch multiplies its bytes by, and then adds to them.
    table[:, :, outputs:] = torch.tensor([1.0, -float(_SHIFT)]).view(torch.uint8)
    return table.view(members * inputs, outputs + TAIL)


def _fake_weight(weight: Tensor, scales: Tensor) -> Tensor:
    members, outputs, inputs = weight.shape
    return weight.new_empty((members * inputs, outputs + TAIL), dtype=torch.uint8)


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


def _int8_linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    members, outputs = scales.shape
    rows, inputs = x.shape[1:]
    if not members * rows * outputs * inputs:
        y = x.new_zeros((members, rows, outputs))
    else:
        places, starts = _places(members, rows, inputs)
        # A reshape may be a view with gaps, which the kernel would read past its end.
        numbers = x.expand(members, -1, -1).reshape(-1).contiguous()
        y = _bags()(weight, places, starts, False, 0, False, numbers).view(members, rows, outputs)
    steps = scales.unsqueeze(1)
    return y.mul_(steps) if bias is None else torch.addcmul(bias.unsqueeze(1), y, steps)


def _fake_linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((scales.shape[0], x.shape[1], scales.shape[1]))


define("int8_scales(Tensor weight) -> Tensor", _int8_scales, _fake_scales, checks.int8_scales)
define("int8_weight(Tensor weight, Tensor scales) -> Tensor", _int8_weight, _fake_weight, checks.int8_weight)
define(
    "int8_linear(Tensor x, Tensor weight, Tensor scales, Tensor? bias) -> Tensor",
    _int8_linear,
    _fake_linear,
    checks.int8_linear,
)
