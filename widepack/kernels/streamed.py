"""Computes linear layers of few rows: weights are read in memory order.

    streamed_linear(x, weight, bias) -> [N, R, O]
    x: [N, R, I], or [1, R, I] for all members   weight: [N, I, O]   bias: [N, O] or none

A row's product is a sum of the weight's rows, each times a number of x. `embedding_bag` computes such a sum,
and runs at the speed of memory. A batched product of one row does not (bench/results/suite-cpu.json, MLP at
batch 1). Up to `FEW` rows are sums too, which read the weight again from a cache. With more rows the op is
the batched product.

Rows that have weights of different members are computed in the same way, without a copy of a weight:

    places = row_places(ids, I)                    ids: [B]: the number of each row's member
    linear_of_rows(x, table, places, bias) -> [B, O]
    x: [B, I]   table: [N * I, O]: the members' weights, each transposed   bias: [B, O], [O] or none

It reads B weights, whatever N is.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .checks.require import dense, for_members, of_shape, require
from .library import NodeList, in_aten, own_op

OP = "widepack.streamed_linear.default"
FEW = 3
"""The most rows of a member that are sums."""

_embedding_bag = torch.ops.aten._embedding_bag_forward_only.default  # the public op computes more


@lru_cache(maxsize=256)
def _numbers(end: int, step: int = 1) -> Tensor:
    with torch.inference_mode(False):  # the cache serves calls outside of inference mode too
        return torch.arange(0, end, step, device="cpu")


@lru_cache(maxsize=256)
def _repeated(members: int, rows: int, inputs: int) -> Tensor:
    """Returns the places of the weights' rows, those of a member for each of its rows."""
    return _numbers(members * inputs).view(members, 1, inputs).repeat(1, rows, 1).view(-1)


@own_op(
    "streamed_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    lambda x, weight, _: x.new_empty((weight.shape[0], x.shape[1], weight.shape[2])),
)
def _streamed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    members, inputs, outputs = dense("weight", weight, 3).shape
    for_members("x", x, members, [None, inputs], weight)
    of_shape("bias", bias, [members, outputs], weight)
    x, rows = x.expand(members, -1, -1), x.shape[1]
    if (
        not 1 <= rows <= FEW
        or weight.device.type != "cpu"
        or weight.dtype != torch.float32
        or not weight.numel()
        or not weight.is_contiguous()
    ):
        return torch.bmm(x, weight) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, weight)
    places = _numbers(members * inputs) if rows == 1 else _repeated(members, rows, inputs)
    y = _sums(x.reshape(members * rows, inputs), weight.view(-1, outputs), places, None)
    y = y.view(members, rows, outputs)
    return y if bias is None else y.add_(bias.unsqueeze(1))


@in_aten(OP)
def _in_aten(new: NodeList, members: int, x: Any, weight: Any, bias: Any) -> None:
    new.product(new.add("aten.expand.default", x, [members, -1, -1], suffix="rows"), weight, bias)


def row_places(ids: Tensor, inputs: int) -> Tensor:
    """Returns which rows of a table are summed: `[B * I]`. ids: `[B]`; inputs: I."""
    return torch.add(_numbers(inputs), ids.unsqueeze(1), alpha=inputs).reshape(-1)


def linear_of_rows(x: Tensor, table: Tensor, places: Tensor, bias: Tensor | None) -> Tensor:
    """Returns `x[b] @ weight[ids[b]] + bias` for each row.

    places: from `row_places`, within the table. torch 2.13 raises RuntimeError for others; its documentation
    does not promise that. Raises: OperandError for another number of inputs.
    """
    require(places.shape[0] == x.numel(), f"x is {list(x.shape)}; the weights take other inputs")
    return _sums(x, table, places, bias)


def _sums(x: Tensor, table: Tensor, places: Tensor, bias: Tensor | None) -> Tensor:
    """Returns for each row of x a sum of rows of the table, at its places, each times a number of x."""
    starts = _numbers(x.numel(), x.shape[1])
    y: Tensor = _embedding_bag(table, places, starts, False, 0, False, x.reshape(-1))[0]
    return y if bias is None else y.add_(bias)
