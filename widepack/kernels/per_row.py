"""Computes linear layers of rows that have weights of different members, without a copy of a weight.

    places = row_places(ids, I)                    ids: [B]: the number of each row's member
    linear_of_rows(x, table, places, bias) -> [B, O]
    x: [B, I]   table: [N * I, O]: the members' weights, each transposed   bias: [B, O], [O] or none

Each row is a sum of rows of its member's weight, as in `streamed.py`. It reads B weights, whatever N is.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from .checks.require import require

_embedding_bag = torch.ops.aten._embedding_bag_forward_only.default  # the public op computes more


@lru_cache(maxsize=64)
def _steps(inputs: int) -> Tensor:
    with torch.inference_mode(False):  # the cache serves calls outside of inference mode too
        return torch.arange(inputs, device="cpu")


@lru_cache(maxsize=256)
def _starts(rows: int, inputs: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.arange(0, rows * inputs, inputs, device="cpu")


def row_places(ids: Tensor, inputs: int) -> Tensor:
    """Returns which rows of a table are summed: `[B * I]`. ids: `[B]`; inputs: I."""
    return torch.add(_steps(inputs), ids.unsqueeze(1), alpha=inputs).reshape(-1)


def linear_of_rows(x: Tensor, table: Tensor, places: Tensor, bias: Tensor | None) -> Tensor:
    """Returns `x[b] @ weight[ids[b]] + bias` for each row.

    places: from `row_places`, within the table. torch 2.13 raises RuntimeError for others; its documentation
    does not promise that. Raises: OperandError for another number of inputs.
    """
    rows, inputs = x.shape
    require(places.shape[0] == x.numel(), f"x is {list(x.shape)}; the weights take other inputs")
    y: Tensor = _embedding_bag(table, places, _starts(rows, inputs), False, 0, False, x.reshape(-1))[0]
    return y if bias is None else y.add_(bias)
