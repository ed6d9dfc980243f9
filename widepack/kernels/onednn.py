"""Calls oneDNN, the library that runs torch's packed layers on a CPU, through torch's private ops.

oneDNN trusts the sizes that it is given, and a weight in its order shows only some of them. So an op that
packs a weight marks it with what it was packed for, and an op that reads it requires the same mark.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .checks.require import OperandError

PACKED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of layers whose weights oneDNN packs."""
ROWS = 32
"""The number of rows for which the weight of a linear layer is packed. That order serves every number."""
_SIXTEEN_BITS = (torch.bfloat16, torch.float16)
_MARK = "widepack_mark"


class Mark:
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
        setattr(packed, _MARK, Mark(dtype, purpose))
    return packed


def mark_of(name: str, weight: Any, *purpose: Any) -> Mark | None:
    """Returns the mark of a weight in oneDNN's order; None for other weights.

    Raises: OperandError if it was packed for another purpose.
    """
    if not isinstance(weight, Tensor):
        raise OperandError(f"{name} is not a tensor")
    if weight.layout is torch.strided:
        return None
    mark: Mark | None = getattr(weight, _MARK, None)
    if mark is None or mark.purpose != purpose:
        packed = mark and mark.purpose
        raise OperandError(f"{name} was packed for {packed}; {purpose} is needed")
    return mark


def usable(weight: Tensor) -> bool:
    """Whether oneDNN can reorder this weight: oneDNN exists, the weight is float32 on a CPU and not empty."""
    return _on_cpu(weight) and weight.dtype == torch.float32


def packed_dtype(weight: Tensor, inputs: int) -> torch.dtype | None:
    """Returns the dtype in which oneDNN packs a weight; None if it cannot.

    That is the weight's own dtype. On a processor without instructions for a 16-bit dtype it is float32, in
    which a layer takes a small part of the time of torch's own kernels for that dtype. So it is where kernels
    would read beyond the inputs.

    Args:
        weight: The weight, in the dtype of the layer.
        inputs: The number of inputs of each group.
    """
    if not _on_cpu(weight) or weight.dtype not in PACKED_DTYPES:
        return None
    own = _has_instructions(weight.dtype) and not reads_beyond(weight.dtype, inputs)
    return weight.dtype if own else torch.float32


def reads_beyond(dtype: torch.dtype, inputs: int | None) -> bool:
    """Returns whether a kernel may read a number behind the inputs of a group, in channels-last memory.

    oneDNN's kernels of 16 bits read inputs in pairs. The second of the last pair belongs to the next group or
    row, which may be another member. Its weight is 0, so only NaN and infinity reach the answer.

    Args:
        dtype: The dtype of the layer.
        inputs: The number of inputs of each group; None if it is not known.
    """
    return dtype in _SIXTEEN_BITS and (inputs is None or inputs % 2 == 1)


def _on_cpu(weight: Tensor) -> bool:
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and weight.device.type == "cpu" and weight.numel() > 0


@cache
def _has_instructions(dtype: torch.dtype) -> bool:
    """Returns whether the processor multiplies numbers of a dtype, in the place of oneDNN's emulation."""
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    if dtype == torch.bfloat16:
        x86 = platform.machine() in ("x86_64", "AMD64")
        has = [getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile")]
        known = not x86 or any(call is not None and call() for call in has)
        return known and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return True


def reorder_convolution_weight(
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    size: Sequence[int],
) -> Tensor:
    """Returns a convolution's weight in oneDNN's order. `size` is an example of the input's sizes."""
    reorder = torch.ops.mkldnn._reorder_convolution_weight  # torch has no public name for it
    packed: Tensor = reorder(weight.contiguous(), padding, stride, dilation, groups, size)
    return packed


def order_of(packed: Tensor) -> tuple[int, ...]:
    """Returns oneDNN's description of the order of a packed weight. Equal orders have equal descriptions."""
    describe = torch.ops.mkldnn._get_mkldnn_serialized_md  # torch has no public name for it
    return tuple(describe(packed).tolist())


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Returns a convolution over a weight in oneDNN's order."""
    run = torch.ops.mkldnn._convolution_pointwise  # torch has no public name for it
    y: Tensor = run(x, weight, bias, padding, stride, dilation, groups, "none", [], "")
    return y


def reorder_linear_weight(weight: Tensor) -> Tensor:
    """Returns the weight `[O, I]` of a linear layer in oneDNN's order.

    The order for `ROWS` rows serves every number of rows: from 1 to 512 rows it takes at most 1.05 times as
    long as the order for that number.
    """
    reorder = torch.ops.mkldnn._reorder_linear_weight  # torch has no public name for it
    packed: Tensor = reorder(weight.contiguous(), ROWS)
    return packed


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns `x @ weight^T + bias` over a weight `[O, I]` in its own order or in oneDNN's."""
    run = torch.ops.mkldnn._linear_pointwise  # torch has no public name for it
    bias = None if bias is None else bias.contiguous()  # oneDNN ignores its stride, which may be 0
    y: Tensor = run(x.contiguous(), weight, bias, "none", [], "")
    return y


def reorder_lstm_weights(
    w_x: Tensor, w_h: Tensor, reverse: bool, size: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Returns an LSTM layer's weights `[4H, I]`, `[4H, H]` in oneDNN's order. `size`: like `[T, B, I]`."""
    reorder = torch.ops.mkldnn._reorder_mkldnn_rnn_layer_weight  # torch has no public name for it
    a, b = reorder(w_x, w_h, w_h.shape[1], reverse, True, False, size)
    return a, b
