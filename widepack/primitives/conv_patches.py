"""Convolutions as batched products, over pixels or over columns of patches.

    y[i] = W[i] P[i] + b[i]    W: [N, O, C*k]    P: [N, C*k, B*L]    y: [N, O, B*L]
    P holds the patch under each position of the window. L is the number of positions: the product of s'.

Groups are one more batch dim of the product. Patches are views of the padded input (`unfold`) and are copied
once. A kernel of size 1 copies nothing where the batch is 1 or the memory is channels-last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..ir.values import Stacked, Value, WideValue
from ..registry.registry import strategy
from ..registry.writer import Writer
from .conv import fixed_numbers

_OPS = "conv1d conv2d conv3d conv1d.padding conv2d.padding conv3d.padding"


def fits(
    w: Writer, x: WideValue, weight: WideValue, bias: WideValue | None = None, *args: Any, **kwargs: Any
) -> bool:
    """Whether input and weight are Stacked and all sizes of the window are static."""
    if not isinstance(x, Stacked) or not isinstance(weight, Stacked) or not all(weight.value.sizes):
        return False
    return fixed_numbers(w, args, kwargs, weight.value.sizes[3:]) is not None


def _pixels(
    w: Writer, x: WideValue, weight: WideValue, bias: WideValue | None = None, *args: Any, **kwargs: Any
) -> bool:
    """Whether the kernel has size 1 and there is no padding."""
    if not fits(w, x, weight, bias, *args, **kwargs):
        return False
    window = weight.value.sizes[3:]  # type: ignore[union-attr]
    fixed = fixed_numbers(w, args, kwargs, window)
    return fixed is not None and all(k == 1 for k in window) and not any(fixed[1])


@strategy(_OPS, "bmm_1x1", family="conv", when=_pixels)
def bmm_1x1(
    w: Writer, x: Stacked, weight: Stacked, bias: WideValue | None = None, *args: Any, **kwargs: Any
) -> WideValue:
    """for a kernel of size 1: one batched product over pixels"""
    return _product(w, x, weight, bias, args, kwargs)


@strategy(_OPS, "unfold_bmm", family="conv", when=fits)
def unfold_bmm(
    w: Writer, x: Stacked, weight: Stacked, bias: WideValue | None = None, *args: Any, **kwargs: Any
) -> WideValue:
    """one batched product over columns of patches"""
    return _product(w, x, weight, bias, args, kwargs)


def _product(
    w: Writer,
    x: Stacked,
    weight: Stacked,
    bias: WideValue | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> WideValue:
    window = [int(k or 0) for k in weight.value.sizes[3:]]
    fixed = fixed_numbers(w, args, kwargs, weight.value.sizes[3:])
    assert fixed is not None
    stride, padding, dilation, groups = fixed
    single, n = x.rank == len(window) + 1, len(window)
    image = w.call("unsqueeze", x.value, 1) if single else x.value  # [N, B, C, *s]
    if any(padding):
        image = w.call("constant_pad_nd", image, [p for side in reversed(padding) for p in (side, side)])
    patches = _patches(w, image, window, stride, dilation)  # [N, B, C, *s', *k]
    patches = w.call("unflatten.int", patches, 2, [groups, -1])  # [N, B, g, C/g, *s', *k]
    places, offsets = range(4, 4 + n), range(4 + n, 4 + 2 * n)
    patches = w.call("permute", patches, [0, 2, 3, *offsets, 1, *places])  # [N, g, C/g, *k, B, *s']
    sizes = [s if s is not None else w.call("sym_size.int", patches, d) for d, s in enumerate(patches.sizes)][
        3 + n :
    ]
    columns = w.call("flatten.using_ints", w.call("flatten.using_ints", patches, 3 + n, -1), 2, 2 + n)
    columns = w.call("flatten.using_ints", columns, 0, 1)  # [N*g, C/g*k, B*L]
    matrix = w.call(
        "flatten.using_ints", w.call("unflatten.int", weight.value, 1, [groups, -1]), 0, 1
    )  # [N*g, O/g, C/g, *k]
    matrix = w.call("flatten.using_ints", matrix, 2, -1)
    if bias is None:
        y = w.call("bmm", matrix, columns)
    else:
        b = w.call(
            "flatten.using_ints", w.call("unflatten.int", w.stack(bias), 1, [groups, -1]), 0, 1
        )  # [N*g, O/g]
        y = w.call("baddbmm", w.call("unsqueeze", b, -1), matrix, columns)
    y = w.call("flatten.using_ints", w.call("unflatten.int", y, 0, [w.members, groups]), 1, 2)  # [N, O, B*L]
    y = w.call("transpose.int", w.call("unflatten.int", y, 2, sizes), 1, 2)  # [N, B, O, *s']
    return Stacked(w.call("squeeze.dim", y, 1) if single else y)


def _patches(
    w: Writer, image: Value, window: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Value:
    """Returns the patches `[N, B, C, *s] -> [N, B, C, *s', *k]` as views."""
    for d, (k, s, far) in enumerate(zip(window, stride, dilation), 3):
        image = w.call("unfold", image, d, far * (k - 1) + 1, s)
        if far > 1:
            image = w.call("slice.Tensor", image, -1, 0, None, far)
    return image
