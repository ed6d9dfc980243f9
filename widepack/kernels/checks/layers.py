"""Checks the operands of attention, normalizations and recurrent layers.

The attention kernel for CPUs trusts what its public op checks before it. Kernels of normalizations trust the
sizes of weights and statistics, those of recurrent layers the sizes of states and weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .require import OperandError, between, check_of, dense, integers, of_shape, readable, require

_REDUCED = (torch.float16, torch.bfloat16)


@check_of("scaled_dot_product_attention.default")
def attention(query: Tensor, key: Tensor, value: Tensor, *rest: object, **named: object) -> None:
    """Checks `aten.scaled_dot_product_attention`: on a CPU torch does not compare key and value."""
    dense("query", query)
    dense("key", key)
    dense("value", value)
    if min(key.dim(), value.dim()) < 2 or key.shape[-2] != value.shape[-2]:
        raise OperandError(f"key is {list(key.shape)} and value {list(value.shape)}; they differ in length")


@check_of("_scaled_dot_product_flash_attention_for_cpu.default")
def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> None:
    """Checks `aten._scaled_dot_product_flash_attention_for_cpu`."""
    batch, heads, rows, width = dense("query", query, 4).shape
    columns = dense("key", key, 4).shape[2]
    of_shape("key", key, [batch, heads, columns, width], query)
    of_shape("value", value, [batch, heads, columns, width], query)
    require(query.dtype.is_floating_point, f"query is {query.dtype}; a floating dtype is needed")
    require(min(batch, heads, rows, columns, width) >= 1, "an operand is empty")
    for name, x in (("query", query), ("key", key), ("value", value)):
        require(x.stride(-1) == 1 or x.shape[-1] == 1, f"the last dim of {name} is not contiguous")
    if attn_mask is None:
        return
    require(not is_causal, "is_causal excludes attn_mask")
    sizes = dense("attn_mask", attn_mask, 2, 4).shape
    full = (batch, heads, rows, columns)[-len(sizes) :]
    if any(found not in (1, wanted) for found, wanted in zip(sizes, full)):
        raise OperandError(f"attn_mask is {list(sizes)}; it does not broadcast to {list(full)}")
    require(attn_mask.dtype in (query.dtype, query.new_empty(0).float().dtype), "attn_mask has another dtype")


@check_of("_masked_softmax.default")
def masked_softmax(self: Tensor, mask: Tensor, dim: int | None = None, mask_type: int | None = None) -> None:
    """Checks `aten._masked_softmax`, whose mask is for columns and rows, for a batch, or for all numbers."""
    dense("self", self)
    dense("mask", mask)
    require(self.numel(), f"self is {list(self.shape)}; it may not be empty")
    last = self.dim() - 1
    require(dim is None or dim in (-1, last), f"dim is {dim}; -1 is needed")
    shapes = {
        0: [*self.shape[-2:]],
        1: [self.shape[0], self.shape[-1]],
        2: [*self.shape],
        None: [*self.shape],
    }
    require(mask_type in shapes, f"mask_type is {mask_type}; 0, 1 or 2 are possible")
    require(mask_type not in (0, 1) or self.dim() == 4, f"self has {self.dim()} dims; 4 are needed")
    of_shape("mask", mask, shapes[mask_type])


def _per_channel(name: str, x: Tensor | None, channels: int, like: Tensor) -> None:
    """Checks one number for each channel, in the dtype of the input, or in float32 for a shorter one."""
    if x is None:
        return
    dense(name, x, 1)
    if x.shape[0] != channels:
        raise OperandError(f"{name} is for {x.shape[0]} channels; {channels} are needed")
    if x.dtype != like.dtype and not (like.dtype in _REDUCED and x.dtype is torch.float32):
        raise OperandError(f"{name} is {x.dtype}; {like.dtype} is needed")


@check_of("_native_batch_norm_legit_functional.default", "_native_batch_norm_legit_no_training.default")
def batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    *rest: object,
) -> None:
    """Checks batch normalizations with running statistics."""
    dense("input", input)
    if input.dim() < 2:
        raise OperandError(f"input has {input.dim()} dims; at least 2 are needed")
    given = {"weight": weight, "bias": bias, "running_mean": running_mean, "running_var": running_var}
    for name, x in given.items():
        _per_channel(name, x, input.shape[1], input)
    dtypes = {x.dtype for x in given.values() if x is not None}
    require(len(dtypes) < 2, "the weights and the statistics have different dtypes")
    require((running_mean is None) == (running_var is None), "running_mean and running_var belong together")


@check_of("_native_batch_norm_legit.no_stats")
def batch_norm_without_statistics(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: object
) -> None:
    """Checks batch normalizations without running statistics."""
    batch_norm(input, weight, bias, None, None)
    require(rest and rest[0] is True, "training is not True, but there are no running statistics")


@check_of("native_group_norm.default")
def group_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    N: int,  # the schema's names
    C: int,
    HxW: int,
    group: int,
    eps: float,
) -> None:
    """Checks `aten.native_group_norm`."""
    dense("input", input)
    require(group >= 1 and C >= 0 and C % group == 0, f"{C} channels do not form {group} groups")
    require(N >= 0 and HxW >= 0 and N * C * HxW == input.numel(), "N, C and HxW are not the sizes of input")
    _per_channel("weight", weight, C, input)
    _per_channel("bias", bias, C, input)


@check_of("_weight_norm.default")
def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> None:
    """Checks `aten._weight_norm` and `aten._weight_norm_interface`."""
    dense("v", v)
    dense("g", g)
    require(v.numel() and v.dim() >= 1, f"v is {list(v.shape)}; it may not be empty")
    require(isinstance(dim, int) and -1 <= dim < v.dim(), f"dim is {dim}; v has {v.dim()} dims")
    if dim >= 0 and g.numel() != v.shape[dim]:
        raise OperandError(f"g has {g.numel()} numbers; dim {dim} of v has {v.shape[dim]}")
    if g.dtype != v.dtype and not (v.dtype in _REDUCED and g.dtype is torch.float32):
        raise OperandError(f"g is {g.dtype}; {v.dtype} is needed")


@check_of("_weight_norm_interface.default")
def weight_norm_kernel(v: Tensor, g: Tensor, dim: int = 0) -> None:
    """Checks `aten._weight_norm_interface`, which knows the first and the last dim alone."""
    weight_norm(v, g, dim)
    require(dim in (0, v.dim() - 1), f"dim is {dim}; 0 or {v.dim() - 1} are possible")


def layer(
    input: Tensor,
    hx: Any,
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
    """Checks `aten.gru.input`, `aten.lstm.input` and `aten.rnn_tanh.input`."""
    batch = dense("input", input, 3).shape[0 if batch_first else 1]
    _layer(input, batch, hx, params, has_biases, num_layers, bidirectional, gates)


def layer_packed(
    data: Tensor,
    batch_sizes: Tensor,
    hx: Any,
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    *,
    gates: int,
) -> None:
    """Checks `aten.gru.data`, `aten.lstm.data` and `aten.rnn_tanh.data`."""
    dense("data", data, 2)
    batch = next(iter(_states(hx, gates).values())).shape[1]
    _batch_sizes(data, batch_sizes, batch)
    _layer(data, batch, hx, params, has_biases, num_layers, bidirectional, gates)


for _cell, _gates in (("gru", 3), ("lstm", 4), ("rnn_relu", 1), ("rnn_tanh", 1)):
    check_of(f"{_cell}.input")(partial(layer, gates=_gates))
    check_of(f"{_cell}.data", reads_values=True)(partial(layer_packed, gates=_gates))


def _states(hx: Any, gates: int) -> dict[str, Tensor]:
    """Returns the states of a layer by name: an LSTM, which has 4 gates, has two."""
    if gates != 4:
        return {"hx": dense("hx", hx, 3)}
    if not isinstance(hx, (list, tuple)) or len(hx) != 2:
        raise OperandError("hx is not a list of two states")
    return {f"hx[{k}]": dense(f"hx[{k}]", state, 3) for k, state in enumerate(hx)}


def _layer(
    x: Tensor,
    batch: int,
    hx: Any,
    params: Any,
    has_biases: bool,
    layers: int,
    bidirectional: bool,
    gates: int,
) -> None:
    """Checks the states and the weights of all layers."""
    directions, states = 2 if bidirectional else 1, _states(hx, gates)
    for name, state in states.items():
        of_shape(name, state, [layers * directions, batch, state.shape[2]], x)
    widths = [state.shape[2] for state in states.values()]
    out, width = widths[0], widths[-1]  # of an output, and of a cell
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
    counts = sizes.tolist()
    require(counts[0] == batch, f"batch_sizes begins with {counts[0]}; the states have a batch of {batch}")
    require(all(a >= b for a, b in pairwise(counts)), "batch_sizes increases")
    require(sum(counts) == data.shape[0], f"batch_sizes is for {sum(counts)} rows; data has {data.shape[0]}")
