"""Defines the op `streamed_linear`, for linear layers of few rows: it reads each weight once, in memory
order.

    streamed_linear(x, weight, bias) -> [N, R, O]
    x: [N, R, I], or [1, R, I] for all members   weight: [N, I, O]   bias: [N, O] or none

With one row, a member's product is a sum of the weight's rows, each times a number of x. `embedding_bag`
computes such a sum, and runs at the speed of memory. A batched product of one row does not
(bench/results/suite-cpu.json, MLP at batch 1). With more rows the op is the batched product. `decompose.py`
writes the op in ATen ops.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from .checks import own_ops as checks
from .library import define

OP = "widepack.streamed_linear.default"

_embedding_bag = torch.ops.aten._embedding_bag_forward_only.default  # the public op computes more


@lru_cache(maxsize=64)
def _bags(members: int, inputs: int) -> tuple[Tensor, Tensor]:
    """Returns the rows of `[N*I, O]` that each member's sum takes, and where each member's rows begin."""
    with torch.inference_mode(False):  # the cache serves calls outside of inference mode too
        return torch.arange(members * inputs), torch.arange(0, members * inputs, inputs)


def _streamed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    members, inputs, outputs = weight.shape
    x = x.expand(members, -1, -1)
    if (
        x.shape[1] != 1
        or weight.device.type != "cpu"
        or weight.dtype != torch.float32
        or not weight.numel()
        or not weight.is_contiguous()
    ):
        return torch.bmm(x, weight) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, weight)
    rows, starts = _bags(members, inputs)
    y: Tensor = _embedding_bag(weight.view(-1, outputs), rows, starts, False, 0, False, x.reshape(-1))[0]
    return (y if bias is None else y.add_(bias)).unsqueeze(1)


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((weight.shape[0], x.shape[1], weight.shape[2]))


define(
    "streamed_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    _streamed_linear,
    _fake,
    checks.streamed_linear,
)
