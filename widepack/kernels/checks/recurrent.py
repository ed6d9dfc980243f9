"""Checks the operands of torch's recurrent layers: their kernels trust the sizes of states and weights."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor

from .require import OperandError, between, dense, integers, of_shape, readable, require


def lstm(
    input: Tensor,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> None:
    """Checks `aten.lstm.input`."""
    batch = dense("input", input, 3).shape[0 if batch_first else 1]
    _lstm(input, batch, hx, params, has_biases, num_layers, bidirectional)


def lstm_packed(
    data: Tensor,
    batch_sizes: Tensor,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> None:
    """Checks `aten.lstm.data`."""
    dense("data", data, 2)
    require(isinstance(hx, (list, tuple)) and hx, "hx is not a list of two states")
    batch = dense("hx[0]", hx[0], 3).shape[1]
    _batch_sizes(data, batch_sizes, batch)
    _lstm(data, batch, hx, params, has_biases, num_layers, bidirectional)


def layer(
    input: Tensor,
    hx: Tensor,
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    *,
    gates: int,
) -> None:
    """Checks `aten.gru.input` and `aten.rnn_tanh.input`."""
    batch = dense("input", input, 3).shape[0 if batch_first else 1]
    width = dense("hx", hx, 3).shape[2]
    directions = 2 if bidirectional else 1
    of_shape("hx", hx, [num_layers * directions, batch, width], input)
    _weights(input, params, has_biases, num_layers, directions, gates, width, width)


def layer_packed(
    data: Tensor,
    batch_sizes: Tensor,
    hx: Tensor,
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    *,
    gates: int,
) -> None:
    """Checks `aten.gru.data` and `aten.rnn_tanh.data`."""
    dense("data", data, 2)
    batch, width = dense("hx", hx, 3).shape[1:]
    _batch_sizes(data, batch_sizes, batch)
    directions = 2 if bidirectional else 1
    of_shape("hx", hx, [num_layers * directions, batch, width], data)
    _weights(data, params, has_biases, num_layers, directions, gates, width, width)


def _lstm(
    x: Tensor, batch: int, hx: Any, params: Any, has_biases: bool, num_layers: int, bidirectional: bool
) -> None:
    if not isinstance(hx, (list, tuple)) or len(hx) != 2:
        raise OperandError("hx is not a list of two states")
    h, c = dense("hx[0]", hx[0], 3), dense("hx[1]", hx[1], 3)
    directions = 2 if bidirectional else 1
    of_shape("hx[0]", h, [num_layers * directions, batch, h.shape[2]], x)
    of_shape("hx[1]", c, [num_layers * directions, batch, c.shape[2]], x)
    _weights(x, params, has_biases, num_layers, directions, 4, h.shape[2], c.shape[2])


def _weights(
    x: Tensor, params: Any, has_biases: bool, layers: int, directions: int, gates: int, out: int, width: int
) -> None:
    """Checks the weights of all layers. out: the width of an output; width: that of a cell."""
    projects = out != width
    each = 2 + (2 if has_biases else 0) + (1 if projects else 0)
    require(layers >= 1, f"num_layers is {layers}; at least 1 is needed")
    if not isinstance(params, (list, tuple)) or len(params) != layers * directions * each:
        raise OperandError(f"the layers need {layers * directions * each} weights")
    rows = gates * width
    for number in range(layers * directions):
        inputs = x.shape[-1] if number < directions else out * directions
        shapes = [[rows, inputs], [rows, out]]
        shapes += [[rows], [rows]] if has_biases else []
        shapes += [[out, width]] if projects else []
        for k, shape in enumerate(shapes):
            of_shape(f"params[{number * each + k}]", params[number * each + k], shape, x)


def _batch_sizes(data: Tensor, sizes: Tensor, batch: int) -> None:
    integers("batch_sizes", sizes, 1)
    require(sizes.device.type in ("cpu", "meta"), "batch_sizes is not on the CPU")
    require(sizes.numel(), "batch_sizes is empty")
    if not readable(sizes):
        return
    between("batch_sizes", sizes, 1, max(batch, 1))
    found = sizes.tolist()
    require(found[0] == batch, f"batch_sizes begins with {found[0]}; the states have a batch of {batch}")
    require(all(a >= b for a, b in pairwise(found)), "batch_sizes increases")
    require(sum(found) == data.shape[0], f"batch_sizes is for {sum(found)} rows; data has {data.shape[0]}")
