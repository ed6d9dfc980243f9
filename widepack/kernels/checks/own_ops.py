"""Checks the operands of widepack's own ops, and marks weights in oneDNN's order.

oneDNN trusts the sizes that it is given, and a weight in its order shows only some of them. So a pack op
marks its result with what it was packed for, and an op that reads it requires the same mark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .convolution_sizes import extents, geometry, transposed_extents
from .require import OperandError, dense, numbers, of_shape, require

_MARK = "widepack_mark"


class _Mark:
    """The mark of a packed weight: its dtype before, its purpose, and the shape of the last image that passed
    the check.
    """

    __slots__ = ("dtype", "image", "purpose")

    def __init__(self, dtype: torch.dtype, purpose: tuple[Any, ...]) -> None:
        self.dtype = dtype
        self.purpose = purpose
        self.image: torch.Size | None = None


def mark(packed: Tensor, dtype: torch.dtype, *purpose: Any) -> Tensor:
    """Marks a weight in oneDNN's order with its dtype before and its purpose, and returns it.

    Other weights stay as they are.
    """
    if packed.is_mkldnn:
        setattr(packed, _MARK, _Mark(dtype, purpose))
    return packed


def packed_for(name: str, weight: Any, *purpose: Any) -> bool:
    """Returns whether a weight is in oneDNN's order.

    Raises: OperandError if it was packed for another purpose.
    """
    if not isinstance(weight, Tensor):
        raise OperandError(f"{name} is not a tensor")
    if weight.layout is torch.strided:
        return False
    found: _Mark | None = getattr(weight, _MARK, None)
    if found is None or found.purpose != purpose:
        packed = found and found.purpose
        raise OperandError(f"{name} was packed for {packed}; {purpose} is needed")
    return True


def _require_dtype(weight: Tensor, x: Tensor) -> None:
    """Checks that an operand has the dtype of the layer whose weight was packed."""
    dtype = getattr(weight, _MARK).dtype
    require(x.dtype is dtype and x.device.type == "cpu", f"x is not {dtype} on the CPU")


def pack_convolution(
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    size: Sequence[int],
    members: int = 0,
) -> None:
    """Checks `widepack.pack_convolution`; with `members` dims before those of the weight, the op for many."""
    spatial = dense("weight", weight, 4 + members, 5 + members).dim() - 2 - members
    geometry(spatial, stride, padding, dilation, groups)
    outputs, inputs = weight.shape[members : members + 2]
    require(outputs % groups == 0, f"{outputs} channels do not form {groups} groups")
    numbers("size", size, spatial + 2, 0)
    require(size[1] == inputs * groups, f"size has {size[1]} channels; {inputs * groups} are needed")
    extents(size[2:], weight.shape[members + 2 :], stride, padding, dilation)


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    act: str = "",
) -> None:
    """Checks `widepack.convolution`.

    A packed weight remembers the shape of the image that passed. An image of the same shape passes again.
    """
    spatial = dense("x", x, 4, 5).dim() - 2
    if packed_for("weight", weight, "convolution", *stride, *padding, *dilation, groups):
        _require_dtype(weight, x)
        if x.shape == getattr(weight, _MARK).image and _plain_bias(bias, weight.shape[0], x.dtype):
            return
    else:  # a packed weight was packed for these numbers, which were checked then
        geometry(spatial, stride, padding, dilation, groups)
    require(weight.dim() == spatial + 2, f"weight has {weight.dim()} dims; {spatial + 2} are needed")
    inputs = weight.shape[1] * groups
    require(x.shape[1] == inputs, f"x has {x.shape[1]} channels; {inputs} are needed")
    require(weight.shape[0] % groups == 0, f"{weight.shape[0]} channels do not form {groups} groups")
    of_shape("bias", bias, [weight.shape[0]], x)
    extents(x.shape[2:], weight.shape[2:], stride, padding, dilation)
    if type(x) is Tensor and weight.layout is not torch.strided:
        getattr(weight, _MARK).image = x.shape


def _plain_bias(bias: Tensor | None, outputs: int, dtype: torch.dtype) -> bool:
    if bias is None:
        return True
    plain = bias.dtype is dtype and bias.layout is torch.strided and bias.is_cpu
    return plain and bias.shape == (outputs,)


def pack_linear(weight: Tensor, rows: int) -> None:
    """Checks `widepack.pack_linear`."""
    dense("weight", weight, 3)
    require(0 <= rows <= 2**24, f"rows is {rows}; numbers up to {2**24} are possible")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, act: str = "") -> None:
    """Checks `widepack.linear`."""
    members, _, inputs = dense("x", x, 3).shape
    if packed_for("weight", weight, "linear", members):
        _require_dtype(weight, x)
    shape = list(weight.shape)
    if weight.dim() != 4 or shape[1:] != [inputs, 1, 1] or members < 1 or shape[0] % members:
        raise OperandError(f"weight is {shape}; [{members} * O, {inputs}, 1, 1] is needed")
    of_shape("bias", bias, [members, shape[0] // members], x)


def streamed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Checks `widepack.streamed_linear`."""
    members, inputs, outputs = dense("weight", weight, 3).shape
    dense("x", x, 3)
    require(x.shape[0] in (1, members), f"x is for {x.shape[0]} members; {members} are needed")
    of_shape("x", x, [x.shape[0], x.shape[1], inputs], weight)
    of_shape("bias", bias, [members, outputs], weight)


def mlp_chain(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], activations: Sequence[str]
) -> None:
    """Checks `widepack.mlp_chain`. The op itself checks the names of the activations."""
    require(len(weights) > 0, "there are no weights")
    for name, found in (("biases", biases), ("activations", activations)):
        if isinstance(found, str) or len(found) != len(weights):
            raise OperandError(
                f"there are {len(found)} {name}; {len(weights)} are needed, one for each layer"
            )
    members, _, inputs = dense("weights[0]", weights[0], 3).shape
    first = weights[0]
    require(first.is_floating_point(), f"weights[0] is {first.dtype}; a float is needed")
    dense("x", x, 3)
    require(x.shape[0] in (1, members), f"x is for {x.shape[0]} members; {members} are needed")
    of_shape("x", x, [x.shape[0], x.shape[1], inputs], first)
    for k, (weight, bias) in enumerate(zip(weights, biases)):
        outputs = dense(f"weights[{k}]", weight, 3).shape[1]
        of_shape(f"weights[{k}]", weight, [members, outputs, inputs], first)
        of_shape(f"biases[{k}]", bias, [members, outputs], first)
        inputs = outputs


def factored_weight(base: Tensor, left: Tensor, right: Tensor, scale: Tensor | None = None) -> None:
    """Checks `widepack.factored_weight`."""
    require(dense("base", base).dim() > 0, "base has no dims")
    require(base.is_floating_point() and left.is_floating_point(), "base and left are not both floats")
    outputs, rank = dense("left", left, 2).shape
    require(base.shape[0] == outputs, f"base is {list(base.shape)}; left has {outputs} rows")
    inputs = math.prod(base.shape[1:])
    of_shape("right", right, [rank, inputs], left)
    if scale is not None:
        straight = dense("scale", scale, 2).shape[1] == 1
        of_shape("scale", scale, [outputs, 1] if straight else [1, inputs], left)
    require(base.device == left.device, f"base is on {base.device}; left is on {left.device}")


def delta_linear(x: Tensor, base: Tensor, left: Tensor, right: Tensor, bias: Tensor | None) -> None:
    """Checks `widepack.delta_linear`."""
    outputs, inputs = dense("base", base, 2).shape
    members, _, rank = dense("left", left, 3).shape
    dense("x", x, 3)
    require(x.shape[0] in (1, members), f"x is for {x.shape[0]} members; {members} are needed")
    of_shape("x", x, [x.shape[0], x.shape[1], inputs], base)
    of_shape("left", left, [members, outputs, rank], base)
    of_shape("right", right, [members, rank, inputs], base)
    if bias is not None:
        rows = dense("bias", bias, 2).shape[0]
        require(rows in (1, members), f"bias is for {rows} members; {members} are needed")
        of_shape("bias", bias, [rows, outputs], base)


def member_convs(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    output_padding: Sequence[int] | None = None,
) -> None:
    """Checks `widepack.member_convs`."""
    transposed = output_padding is not None
    members, packed, of_group, *window = dense("weight", weight, 4, 5, 6).shape
    dense("x", x, weight.dim())
    geometry(len(window), stride, padding, dilation, groups)
    require(x.shape[0] in (1, members), f"x is for {x.shape[0]} members; {members} are needed")
    inputs, outputs = (packed, of_group * groups) if transposed else (of_group * groups, packed)
    of_shape("x", x, [x.shape[0], x.shape[1], inputs, *x.shape[3:]], weight)
    of_shape("bias", bias, [members, outputs], weight)
    require(members > 0, "weight is for 0 members; at least 1 is needed")
    require(packed % groups == 0, f"{packed} channels do not form {groups} groups")
    if output_padding is None:
        extents(x.shape[3:], window, stride, padding, dilation)
    else:
        transposed_extents(x.shape[3:], window, stride, padding, dilation, output_padding)


def member_products(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Checks `widepack.member_products`."""
    members, outputs, inputs = dense("weight", weight, 3).shape
    dense("x", x, 3)
    require(x.shape[0] in (1, members), f"x is for {x.shape[0]} members; {members} are needed")
    of_shape("x", x, [x.shape[0], x.shape[1], inputs], weight)
    of_shape("bias", bias, [members, outputs], weight)


def steps(
    gates: int, x: Tensor, h: Tensor, w_x: Tensor, w_h: Tensor, b_x: Tensor | None, b_h: Tensor | None
) -> None:
    """Checks a layer over steps: sizes as in `recurrent.py`."""
    members, batch, width = dense("h", h, 3).shape
    _input(x, members, batch, h)
    of_shape("w_x", w_x, [members, x.shape[3], w_x.shape[-1] if w_x.dim() else 0], h)
    of_shape("w_h", w_h, [members, width, w_x.shape[2]], h)
    of_shape("b_x", b_x, [members, w_x.shape[2]], h)
    of_shape("b_h", b_h, [members, w_x.shape[2]], h)
    require(w_x.shape[2] % gates == 0, f"{w_x.shape[2]} rows are not {gates} gates")


def _input(x: Tensor, members: int, batch: int, like: Tensor) -> None:
    dense("x", x, 4)
    require(x.shape[0] in (1, members), f"x is for {x.shape[0]} members; {members} are needed")
    of_shape("x", x, [x.shape[0], x.shape[1], batch, x.shape[3]], like)


def rnn_steps(
    x: Tensor,
    h: Tensor,
    w_x: Tensor,
    w_h: Tensor,
    b_x: Tensor | None,
    b_h: Tensor | None,
    reverse: bool,
    act: str,
) -> None:
    """Checks `widepack.rnn_steps`."""
    steps(1, x, h, w_x, w_h, b_x, b_h)
    require(w_x.shape[2] == h.shape[2], f"w_x is for a state of {w_x.shape[2]}; h has {h.shape[2]}")


def gru_steps(
    x: Tensor,
    h: Tensor,
    w_x: Tensor,
    w_h: Tensor,
    b_x: Tensor | None,
    b_h: Tensor | None,
    reverse: bool,
) -> None:
    """Checks `widepack.gru_steps`."""
    steps(3, x, h, w_x, w_h, b_x, b_h)
    require(w_x.shape[2] == 3 * h.shape[2], f"w_x is for a state of {w_x.shape[2] // 3}; h has {h.shape[2]}")


def lstm_steps(
    x: Tensor,
    h: Tensor,
    c: Tensor,
    w_x: Tensor,
    w_h: Tensor,
    b_x: Tensor | None,
    b_h: Tensor | None,
    w_p: Tensor | None,
    reverse: bool,
) -> None:
    """Checks `widepack.lstm_steps`."""
    steps(4, x, h, w_x, w_h, b_x, b_h)
    width = w_x.shape[2] // 4
    of_shape("c", c, [*h.shape[:2], width], h)
    of_shape("w_p", w_p, [h.shape[0], width, h.shape[2]], h)
    require(w_p is not None or width == h.shape[2], f"w_x is for a state of {width}; h has {h.shape[2]}")


def rnn_training(
    x: Tensor, h: Tensor, w_x: Tensor, w_h: Tensor, b_x: Tensor | None, b_h: Tensor | None, act: str
) -> None:
    """Checks `widepack.rnn_training`."""
    rnn_steps(x, h, w_x, w_h, b_x, b_h, False, act)


def gru_training(
    x: Tensor, h: Tensor, w_x: Tensor, w_h: Tensor, b_x: Tensor | None, b_h: Tensor | None
) -> None:
    """Checks `widepack.gru_training`."""
    gru_steps(x, h, w_x, w_h, b_x, b_h, False)


def lstm_training(
    x: Tensor, h: Tensor, c: Tensor, w_x: Tensor, w_h: Tensor, b_x: Tensor | None, b_h: Tensor | None
) -> None:
    """Checks `widepack.lstm_training`."""
    lstm_steps(x, h, c, w_x, w_h, b_x, b_h, None, False)


def pack_lstm(w_x: Tensor, w_h: Tensor, reverse: bool, size: Sequence[int]) -> None:
    """Checks `widepack.pack_lstm`."""
    members, inputs, rows = dense("w_x", w_x, 3).shape
    units = dense("w_h", w_h, 3).shape[1]
    of_shape("w_h", w_h, [members, units, rows], w_x)
    require(rows == 4 * units, f"w_x has {rows} rows; 4 * {units} are needed")
    numbers("size", size, 3, 0, 2**24)
    require(size[2] == inputs, f"size is for inputs of {size[2]}; w_x has {inputs}")


def packed_lstm(
    x: Tensor,
    h: Tensor,
    c: Tensor,
    weights: Sequence[Tensor],
    b_x: Tensor | None,
    b_h: Tensor | None,
    reverse: bool,
) -> None:
    """Checks `widepack.packed_lstm`."""
    members, batch, units = dense("h", h, 3).shape
    _input(x, members, batch, h)
    of_shape("c", c, h.shape, h)
    if len(weights) != 2 * members or not members:
        raise OperandError(f"there are {len(weights)} weights; two for each of {members} members are needed")
    packed = packed_for("weights[0]", weights[0], "lstm", bool(reverse))
    for k, weight in enumerate(weights):
        if packed_for(f"weights[{k}]", weight, "lstm", bool(reverse)) != packed:
            raise OperandError("some of the weights are packed")
        inputs = x.shape[3] if k < members else units
        wanted = [1, 1, inputs, 4, units] if packed else [4 * units, inputs]
        if list(weight.shape) != wanted or weight.dtype != h.dtype:
            raise OperandError(f"weights[{k}] is {list(weight.shape)}; {wanted} is needed")
    if packed:
        require(h.dtype is torch.float32 and h.device.type == "cpu", "h is not float32 on the CPU")
    of_shape("b_x", b_x, [members, 4 * units], h)
    of_shape("b_h", b_h, [members, 4 * units], h)
