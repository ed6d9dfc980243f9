"""Defines widepack's own ops for layers over weights in oneDNN's order. They run on a CPU.

| op | what it computes |
|---|---|
| `pack_convolution(weight, stride, padding, dilation, groups, size)` | a convolution's weight, reordered |
| `pack_convolutions(weight, ...)` | N members' weights `[N, O, C/g, *k]`, reordered: a list of N |
| `convolution(x, weight, bias, stride, padding, dilation, groups, act)` | 2 or 3 spatial dims |
| `pack_linear(weight, rows)` | N layers' weights `[N, O, I]`, reordered |
| `linear(x, weight, bias, act)` | `x [N, R, I]`, `bias [N, O]` -> `[N, R, O]`, in memory `[R, N, O]` |
| `pack_inner_product(weight)` | the weight `[O, I]` of one member's linear layer, reordered |
| `pack_inner_products(weight)` | N members' weights `[N, O, I]`, reordered: a list of N |
| `inner_product(x, weight, bias, act)` | one member's linear layer: `x [*, I]` -> `[*, O]` |

`size` is an example of the input's sizes, a hint for the order. `rows` was one, and is not used. The answer
of `convolution` is channels-last in memory.

`linear` is a 1x1 convolution of N groups over images of rows. This is the only form in which oneDNN takes
weights in its own order for all members in one call. From 64 rows of an image on, oneDNN has another order
for large weights. A call over a weight in the other order takes 25 to 100 times as long. So an image has at
most `MOST_ROWS` rows, and one packed weight serves every batch about as fast as one that is packed for it.
Without AVX-512 the order depends on more, and an image has one of `row_counts`.

`act` is `relu`, `gelu`, `sigmoid`, `silu`, `tanh` or empty. torch computes it in the answer's memory.
oneDNN's fused relu is not used, because it makes 0 of NaN, which would hide a broken member. The ops of
recurrent layers are in recurrent.py.

Layers run in float32, bfloat16 and float16. On a processor without instructions for a 16-bit dtype, and for
an odd number of inputs, the weight is packed in float32, and the answer is rounded to the dtype
(`onednn.packed_dtype`).

A packed weight is opaque: only its sizes can be read. The weight prologue makes it, and it is never saved.
Without oneDNN, and for other devices and dtypes, packing copies the weight, and the layer runs in ATen ops.
`decompose.py` leaves the packing out.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from . import onednn
from .checks.images import extents, geometry
from .checks.require import OperandError, dense, numbers, of_shape, require
from .library import NodeList, in_aten, own_op
from .onednn import Mark, mark_of, packed_dtype

ACTIVATIONS = {
    "": None,
    "gelu": torch.ops.aten.gelu_.default,
    "relu": torch.ops.aten.relu_.default,
    "sigmoid": torch.ops.aten.sigmoid_.default,
    "silu": torch.ops.aten.silu_.default,
    "tanh": torch.ops.aten.tanh_.default,
}
"""The op that computes each activation in place, by the name of its ATen op."""

MOST_ROWS = 63
PACKED_LISTS = frozenset({"widepack.pack_convolutions.default", "widepack.pack_inner_products.default"})
"""The ops that pack each member's weight by itself."""


def _activate(y: Tensor, act: str) -> Tensor:
    """Applies an activation in y's memory and returns y."""
    if act not in ACTIVATIONS:
        raise ValueError(
            f"widepack: the activation {act!r} is unknown; known: {', '.join(filter(None, ACTIVATIONS))}"
        )
    activation = ACTIVATIONS[act]
    return y if activation is None else activation(y)


@own_op(
    "pack_convolution(Tensor weight, int[] stride, int[] padding, int[] dilation, int groups, int[] size)"
    " -> Tensor",
    lambda weight, *_: torch.empty_like(weight),
)
def _pack_convolution(
    weight: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int, size: list[int]
) -> Tensor:
    outputs, inputs, *window = dense("weight", weight, 4, 5).shape
    geometry(len(window), stride, padding, dilation, groups)
    require(outputs % groups == 0, f"{outputs} channels do not form {groups} groups")
    numbers("size", size, len(window) + 2, 0)
    require(size[1] == inputs * groups, f"size has {size[1]} channels; {inputs * groups} are needed")
    extents(size[2:], window, padding, dilation)
    dtype = packed_dtype(weight, inputs)
    if dtype is None:
        return weight.clone(memory_format=torch.contiguous_format)
    example = [max(1, n) for n in size]  # oneDNN divides by these
    packed = onednn.reorder_convolution_weight(weight.to(dtype), stride, padding, dilation, groups, example)
    return onednn.mark(packed, weight.dtype, "convolution", *stride, *padding, *dilation, groups)


@own_op(
    "pack_convolutions(Tensor weight, int[] stride, int[] padding, int[] dilation, int groups, int[] size)"
    " -> Tensor[]",
    None,
)
def _pack_convolutions(
    weight: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int, size: list[int]
) -> list[Tensor]:
    members = dense("weight", weight, 5, 6).unbind(0)
    return [_pack_convolution(w, stride, padding, dilation, groups, size) for w in members]


@in_aten("widepack.pack_convolutions.default")
def _unpacked_in_aten(new: NodeList, _: int, weight: Any, *given: Any) -> None:
    new.add("aten.unbind.int", weight, 0)


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


def _fake_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    n, c, *spatial = _output_sizes(x, weight, *options[:3])
    order = [0, *range(2, 2 + len(spatial)), 1]
    y = x.new_empty([n, *spatial, c])
    return y.permute([order.index(d) for d in range(len(order))])


def _require_dtype(mark: Mark, x: Tensor) -> None:
    """Checks that an operand has the dtype of the layer whose weight was packed."""
    require(x.dtype is mark.dtype and x.device.type == "cpu", f"x is not {mark.dtype} on the CPU")


def _is_plain_bias(bias: Tensor | None, outputs: int, dtype: torch.dtype) -> bool:
    if bias is None:
        return True
    plain = bias.dtype is dtype and bias.layout is torch.strided and bias.is_cpu
    return plain and bias.shape == (outputs,)


@own_op(
    "convolution(Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] dilation, "
    "int groups, str act='') -> Tensor",
    _fake_convolution,
)
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
    spatial = dense("x", x, 4, 5).dim() - 2
    mark = mark_of("weight", weight, "convolution", *stride, *padding, *dilation, groups)
    if mark is None:  # a packed weight was packed for these numbers, which were checked then
        geometry(spatial, stride, padding, dilation, groups)
    else:
        _require_dtype(mark, x)
    # a packed weight remembers the shape of the image that passed, which passes again
    if not (mark and x.shape == mark.image and _is_plain_bias(bias, weight.shape[0], x.dtype)):
        require(weight.dim() == spatial + 2, f"weight has {weight.dim()} dims; {spatial + 2} are needed")
        inputs = weight.shape[1] * groups
        require(x.shape[1] == inputs, f"x has {x.shape[1]} channels; {inputs} are needed")
        require(weight.shape[0] % groups == 0, f"{weight.shape[0]} channels do not form {groups} groups")
        of_shape("bias", bias, [weight.shape[0]], x)
        extents(x.shape[2:], weight.shape[2:], padding, dilation)
        if type(x) is Tensor and mark:
            mark.image = x.shape
    memory_format = torch.channels_last if spatial == 2 else torch.channels_last_3d
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


@in_aten("widepack.convolution.default")
def _convolution_in_aten(
    new: NodeList, _: int, x: Any, weight: Any, bias: Any, stride: Any, *given: Any
) -> None:
    *numbers, act = given if len(given) == 4 else (*given, "")
    y = new.add(f"aten.conv{len(stride)}d.default", x, weight, bias, stride, *numbers, suffix="plain")
    if act:
        new.add(f"aten.{act}.default", y, suffix="act")


@own_op(
    "pack_linear(Tensor weight, int rows) -> Tensor",
    lambda weight, _: weight.new_empty(weight.shape[0] * weight.shape[1], weight.shape[2], 1, 1),
)
def _pack_linear(weight: Tensor, rows: int) -> Tensor:
    members, outputs, inputs = dense("weight", weight, 3).shape
    require(0 <= rows <= 2**24, f"rows is {rows}; numbers up to {2**24} are possible")
    flat = weight.reshape(members * outputs, inputs, 1, 1)
    dtype = packed_dtype(weight, inputs)
    if dtype is None:
        return flat.clone(memory_format=torch.contiguous_format)
    counts = () if _takes_every_count() else row_counts(members, outputs, inputs, dtype)
    size = [1, members * inputs, counts[0] if counts else onednn.ROWS, 1]
    packed = onednn.reorder_convolution_weight(flat.to(dtype), [1, 1], [0, 0], [1, 1], members, size)
    return onednn.mark(packed, weight.dtype, "linear", members)


COUNTS = (1, 2, 4, 8, 16, 32, 48, 64)
"""The rows that an image may have without AVX-512."""


@cache
def row_counts(members: int, outputs: int, inputs: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Returns the rows of an image for which oneDNN takes a weight in one order: most of `COUNTS`.

    Without AVX-512 the order changes with the rows. A call over a weight in another order takes a hundred
    times as long, because oneDNN reorders the weight first.
    """
    weight = torch.zeros(members * outputs, inputs, 1, 1, dtype=dtype)
    orders: dict[object, list[int]] = {}
    for rows in COUNTS:
        size = [1, members * inputs, rows, 1]
        packed = onednn.reorder_convolution_weight(weight, [1, 1], [0, 0], [1, 1], members, size)
        orders.setdefault(onednn.order_of(packed), []).append(rows)
    most = max(orders.values(), key=len)
    return tuple(most)


@cache
def _takes_every_count() -> bool:
    """Returns whether oneDNN has fast kernels for every number of rows: it does with AVX-512."""
    limited = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper().startswith(("SSE", "AVX2", "AVX_"))
    return not limited and torch.backends.cpu.get_cpu_capability() == "AVX512"


def images_of_rows(rows: int, counts: Sequence[int] = ()) -> tuple[int, int]:
    """Returns how many images the rows are, and the rows of each: all together at least as many.

    Args:
        rows: The rows.
        counts: The rows that an image may have, smallest first; nothing where the order of the weight serves
            every number up to `MOST_ROWS`.
    """
    if counts:
        images = -(-rows // counts[-1])
        return images, next(n for n in counts if n * images >= rows)
    if rows <= MOST_ROWS:
        return 1, rows
    for each in (*range(onednn.ROWS, onednn.ROWS // 2 - 1, -1), *range(MOST_ROWS, onednn.ROWS, -1)):
        if rows % each == 0:
            return rows // each, each
    images = -(-rows // MOST_ROWS)
    return images, -(-rows // images)


def _fake_linear(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape[1], x.shape[0], weight.shape[0] // x.shape[0]).transpose(0, 1)


@own_op("linear(Tensor x, Tensor weight, Tensor? bias, str act='') -> Tensor", _fake_linear)
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, act: str = "") -> Tensor:
    members, rows, inputs = dense("x", x, 3).shape
    if (mark := mark_of("weight", weight, "linear", members)) is not None:
        _require_dtype(mark, x)
    shape = list(weight.shape)
    if weight.dim() != 4 or shape[1:] != [inputs, 1, 1] or members < 1 or shape[0] % members:
        raise OperandError(f"weight is {shape}; [{members} * O, {inputs}, 1, 1] is needed")
    of_shape("bias", bias, [members, shape[0] // members], x)
    if rows == 0 and weight.is_mkldnn:
        return x.new_empty(rows, members, weight.shape[0] // members).transpose(0, 1)
    if weight.is_mkldnn:
        outputs = shape[0] // members
        counts = () if _takes_every_count() else row_counts(members, outputs, inputs, weight.dtype)
        images, each = images_of_rows(rows, counts)
        flat_rows = x.transpose(0, 1).reshape(rows, members * inputs)
        if images * each > rows:
            flat_rows = torch.nn.functional.pad(flat_rows, (0, 0, 0, images * each - rows))
        image = flat_rows.reshape(images, each, 1, members * inputs).permute(0, 3, 1, 2)
        # oneDNN ignores strides, and a bias that all members share may have a stride of 0
        flat = None if bias is None else bias.to(weight.dtype).reshape(-1).contiguous()
        y = onednn.convolution(image.to(weight.dtype), weight, flat, [1, 1], [0, 0], [1, 1], members)
        y = y.to(x.dtype).permute(0, 2, 3, 1).reshape(images * each, members, -1)[:rows]
    else:
        w = weight.reshape(members, -1, inputs).transpose(1, 2)
        y = torch.bmm(x, w) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, w)
        y = y.transpose(0, 1).contiguous()
    return _activate(y, act).transpose(0, 1)


@in_aten("widepack.linear.default")
def _linear_in_aten(new: NodeList, _: int, x: Any, weight: Any, bias: Any, act: str = "") -> None:
    turned = new.add("aten.transpose.int", weight, 1, 2, suffix="turned")
    y = new.product(x, turned, bias, "plain")
    if act:
        new.add(f"aten.{act}.default", y, suffix="act")


def _fake_pack(weight: Tensor) -> Tensor:
    return torch.empty_like(weight)


@own_op("pack_inner_product(Tensor weight) -> Tensor", _fake_pack)
def _pack_inner_product(weight: Tensor) -> Tensor:
    dtype = packed_dtype(weight, dense("weight", weight, 2).shape[1])
    if dtype is None:
        return weight.clone(memory_format=torch.contiguous_format)
    return onednn.mark(onednn.reorder_linear_weight(weight.to(dtype)), weight.dtype, "inner product")


@own_op("pack_inner_products(Tensor weight) -> Tensor[]", None)
def _pack_inner_products(weight: Tensor) -> list[Tensor]:
    return [_pack_inner_product(w) for w in dense("weight", weight, 3).unbind(0)]


@in_aten("widepack.pack_inner_products.default")
def _unpacked_layers_in_aten(new: NodeList, _: int, weight: Any) -> None:
    new.add("aten.unbind.int", weight, 0)


def _fake_inner_product(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty([*x.shape[:-1], weight.shape[0]])


@own_op("inner_product(Tensor x, Tensor weight, Tensor? bias, str act='') -> Tensor", _fake_inner_product)
def _inner_product(x: Tensor, weight: Tensor, bias: Tensor | None, act: str = "") -> Tensor:
    shape = dense("x", x).shape
    if (mark := mark_of("weight", weight, "inner product")) is not None:
        _require_dtype(mark, x)
    # a packed weight remembers the shape of the rows that passed, which pass again
    if not (mark and shape == mark.image and _is_plain_bias(bias, weight.shape[0], x.dtype)):
        require(weight.dim() == 2 and x.dim() > 0, f"weight has {weight.dim()} dims, and x has {x.dim()}")
        require(shape[-1] == weight.shape[1], f"x has {shape[-1]} inputs; {weight.shape[1]} are needed")
        of_shape("bias", bias, [weight.shape[0]], x)
        if type(x) is Tensor and mark:
            mark.image = shape
    if mark is None:
        return _activate(torch.nn.functional.linear(x, weight, bias), act)
    if not x.numel():
        return x.new_empty([*shape[:-1], weight.shape[0]])
    rows = x if x.dim() > 1 else x.unsqueeze(0)
    if x.dtype is weight.dtype:
        y = onednn.linear(rows, weight, bias)
    else:
        bias = None if bias is None else bias.to(weight.dtype)
        y = onednn.linear(rows.to(weight.dtype), weight, bias).to(x.dtype)
    return _activate(y if x.dim() > 1 else y.squeeze(0), act)


@in_aten("widepack.inner_product.default")
def _inner_product_in_aten(new: NodeList, _: int, x: Any, weight: Any, bias: Any, act: str = "") -> None:
    y = new.add("aten.linear.default", x, weight, bias, suffix="plain")
    if act:
        new.add(f"aten.{act}.default", y, suffix="act")
