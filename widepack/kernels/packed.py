"""Defines widepack's own ops for layers over weights in oneDNN's order. They run on a CPU.

| op | what it computes |
|---|---|
| `pack_convolution(weight, stride, padding, dilation, groups, size)` | a convolution's weight, reordered |
| `pack_convolutions(weight, ...)` | N members' weights `[N, O, C/g, *k]`, reordered: a list of N |
| `convolution(x, weight, bias, stride, padding, dilation, groups, act)` | 2 or 3 spatial dims |
| `pack_linear(weight, rows)` | N layers' weights `[N, O, I]`, reordered |
| `linear(x, weight, bias, act)` | `x [N, R, I]`, `bias [N, O]` -> `[N, R, O]`, in memory `[R, N, O]` |

`size` is an example of the input's sizes, and `rows` of a member's rows: hints for the order. The answer of
`convolution` is channels-last in memory.

`linear` is a 1x1 convolution of N groups over an image of R x 1. This is the only form in which oneDNN takes
weights in its own order for all members in one call.

`act` is `relu`, `gelu`, `sigmoid`, `silu`, `tanh` or empty. torch computes it in the answer's memory.
oneDNN's fused relu is not used, because it makes 0 of NaN, which would hide a broken member. The ops of
recurrent layers are in recurrent.py.

Layers run in float32, bfloat16 and float16. On a processor without instructions for a 16-bit dtype, and for
an odd number of inputs, the weight is packed in float32, and the answer is rounded to the dtype
(`onednn.packed_dtype`).

A packed weight is opaque: only its sizes can be read. The weight prologue makes it, and it is never saved.
Without oneDNN, and for other devices and dtypes, packing copies the weight, and the layer runs in ATen ops.
`decompose.py` writes every op in ATen ops.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import onednn
from .checks import own_ops as checks
from .library import define
from .onednn import packed_dtype

ACTIVATIONS = {
    "": None,
    "gelu": torch.ops.aten.gelu_.default,
    "relu": torch.ops.aten.relu_.default,
    "sigmoid": torch.ops.aten.sigmoid_.default,
    "silu": torch.ops.aten.silu_.default,
    "tanh": torch.ops.aten.tanh_.default,
}
"""The op that computes each activation in place, by the name of its ATen op."""


def _activate(y: Tensor, act: str) -> Tensor:
    """Applies an activation in y's memory and returns y."""
    if act not in ACTIVATIONS:
        raise ValueError(
            f"widepack: the activation {act!r} is unknown; known: {', '.join(filter(None, ACTIVATIONS))}"
        )
    activation = ACTIVATIONS[act]
    return y if activation is None else activation(y)


def _channels_last(spatial: int) -> torch.memory_format:
    return torch.channels_last if spatial == 2 else torch.channels_last_3d


def _pack_convolution(
    weight: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int, size: list[int]
) -> Tensor:
    dtype = packed_dtype(weight, weight.shape[1])
    if dtype is None:
        return weight.clone(memory_format=torch.contiguous_format)
    example = [max(1, n) for n in size]  # oneDNN divides by these
    packed = onednn.reorder_convolution_weight(weight.to(dtype), stride, padding, dilation, groups, example)
    return checks.mark(packed, weight.dtype, "convolution", *stride, *padding, *dilation, groups)


def _pack_convolutions(
    weight: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int, size: list[int]
) -> list[Tensor]:
    return [_pack_convolution(w, stride, padding, dilation, groups, size) for w in weight.unbind(0)]


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    act: str = "",
) -> Tensor:
    memory_format = _channels_last(len(stride))
    if x.shape[0] == 0 and weight.is_mkldnn:  # oneDNN refuses an empty batch
        sizes = _output_sizes(x, weight, stride, padding, dilation)
        return torch.empty(sizes, dtype=x.dtype).contiguous(memory_format=memory_format)
    if weight.is_mkldnn:
        image = x.to(weight.dtype, memory_format=memory_format).contiguous(memory_format=memory_format)
        bias = None if bias is None else bias.to(weight.dtype).contiguous()
        y = onednn.convolution(image, weight, bias, stride, padding, dilation, groups).to(x.dtype)
    else:
        y = torch.convolution(x, weight, bias, stride, padding, dilation, False, [0] * len(stride), groups)
    return _activate(y.contiguous(memory_format=memory_format), act)


def _output_sizes(
    x: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int]
) -> list[Any]:
    """Returns the sizes of a convolution's answer."""
    window = zip(x.shape[2:], weight.shape[2:], stride, padding, dilation)
    return [
        x.shape[0],
        weight.shape[0],
        *((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in window),
    ]


def _pack_linear(weight: Tensor, rows: int) -> Tensor:
    members, outputs, inputs = weight.shape
    flat = weight.reshape(members * outputs, inputs, 1, 1)
    dtype = packed_dtype(weight, inputs)
    if dtype is None:
        return flat.clone(memory_format=torch.contiguous_format)
    size = [1, members * inputs, max(rows, 1), 1]
    packed = onednn.reorder_convolution_weight(flat.to(dtype), [1, 1], [0, 0], [1, 1], members, size)
    return checks.mark(packed, weight.dtype, "linear", members)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, act: str = "") -> Tensor:
    members, rows, inputs = x.shape
    if rows == 0 and weight.is_mkldnn:
        return x.new_empty(rows, members, weight.shape[0] // members).transpose(0, 1)
    if weight.is_mkldnn:
        image = x.transpose(0, 1).reshape(1, rows, 1, members * inputs).permute(0, 3, 1, 2)
        # oneDNN ignores strides, and a bias that all members share may have a stride of 0
        flat = None if bias is None else bias.to(weight.dtype).reshape(-1).contiguous()
        y = onednn.convolution(image.to(weight.dtype), weight, flat, [1, 1], [0, 0], [1, 1], members)
        y = y.to(x.dtype).permute(0, 2, 3, 1).reshape(rows, members, -1)
    else:
        w = weight.reshape(members, -1, inputs).transpose(1, 2)
        y = torch.bmm(x, w) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, w)
        y = y.transpose(0, 1).contiguous()
    return _activate(y, act).transpose(0, 1)


def _fake_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    act: str = "",
) -> Tensor:
    n, c, *spatial = _output_sizes(x, weight, stride, padding, dilation)
    order = [0, *range(2, 2 + len(spatial)), 1]
    y = x.new_empty([n, *spatial, c])
    return y.permute([order.index(d) for d in range(len(order))])


def _fake_linear(x: Tensor, weight: Tensor, bias: Tensor | None, act: str = "") -> Tensor:
    return x.new_empty(x.shape[1], x.shape[0], weight.shape[0] // x.shape[0]).transpose(0, 1)


define(
    "pack_convolution(Tensor weight, int[] stride, int[] padding, int[] dilation, int groups, int[] size)"
    " -> Tensor",
    _pack_convolution,
    lambda weight, *_: torch.empty_like(weight),
    checks.pack_convolution,
)
define(
    "pack_convolutions(Tensor weight, int[] stride, int[] padding, int[] dilation, int groups, int[] size)"
    " -> Tensor[]",
    _pack_convolutions,
    None,
    partial(checks.pack_convolution, members=1),
)
define(
    "convolution(Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] padding, "
    "int[] dilation, int groups,"
    " str act='') -> Tensor",
    _convolution,
    _fake_convolution,
    checks.convolution,
)
define(
    "pack_linear(Tensor weight, int rows) -> Tensor",
    _pack_linear,
    lambda weight, rows: weight.new_empty(weight.shape[0] * weight.shape[1], weight.shape[2], 1, 1),
    checks.pack_linear,
)
define(
    "linear(Tensor x, Tensor weight, Tensor? bias, str act='') -> Tensor",
    _linear,
    _fake_linear,
    checks.linear,
)
