"""Sizes, and values made from sizes: zeros_like, new_full, fill, copy.

sym_size, sym_numel      the member's size along a dim, or its number of elements    x: [N, *s]    y: a number
zeros_like, new_ones     y = a constant of the sizes s                              y: [*s], Shared
fill, copy, type_as      y[i] = a source in the shape and dtype, or the dtype, of another value

All members have the same sizes. So a size, and a value that is made from sizes alone, is Shared.
"""

from __future__ import annotations

from typing import Any

import torch

from ..ir.values import Shared, Stacked, WideValue
from ..registry.registry import strategy
from ..registry.samples import B, Draw, Sample, bits, call, samples, unary
from ..registry.writer import Writer, put_shared, rank

samples("sym_size.int")(lambda draw: [call(draw.normal(B, 3, 4), d) for d in (0, 1, -1, -3)])


samples("sym_numel")(unary)


@samples("zeros_like ones_like empty_like")
def _likes(draw: Draw) -> list[Sample]:
    return [
        *unary(draw),
        *bits(draw),
        call(draw.normal(B, 3), dtype=torch.int64),
        call(draw.normal(B, 3, 4), memory_format=torch.preserve_format),
    ]


samples("full_like")(
    lambda draw: [
        call(draw.normal(B, 3), 0.5),
        call(draw.ints(0, 9, B, 3), 2),
        call(draw.normal(), 1, dtype=torch.int64),
        call(draw.bools(B), True),
    ]
)


samples("new_zeros new_ones new_empty")(
    lambda draw: [
        call(draw.normal(B, 3), [2, B]),
        call(draw.normal(), []),
        call(draw.normal(3), [4], dtype=torch.int64),
    ]
)


samples("new_full")(
    lambda draw: [
        call(draw.normal(B, 3), [2, B], 0.5),
        call(draw.ints(0, 9), [], 3),
        call(draw.normal(3), [4], 1, dtype=torch.bool),
    ]
)


samples("fill.Scalar")(
    lambda draw: [call(draw.normal(B, 3), 0.5), call(draw.ints(0, 9, B, 3), 2), call(draw.normal(), 1)]
)


samples("fill.Tensor")(
    lambda draw: [call(draw.normal(*s), v) for s in ((B, 3), ()) for v in (draw.normal(), draw.ints(0, 9))]
)
samples("copy")(
    lambda draw: (
        [
            call(draw.normal(*a), draw.normal(*b))
            for a, b in (((B, 3), (B, 3)), ((B, 3), (3,)), ((B, 3), ()), ((), ()))
        ]
        + [
            call(draw.ints(0, 9, B, 3), draw.normal(3)),
            call(draw.normal(B, 3), draw.normal(3, dtype=torch.float64)),
        ]
    )
)
samples("type_as")(
    lambda draw: [
        call(draw.normal(B, 3), draw.ints(0, 3, 2)),
        call(draw.ints(0, 9, B), draw.normal(dtype=torch.float64)),
    ]
)


@strategy("sym_size.int", "shape", family="shape")
def sym_size(w: Writer, x: Stacked, dim: int) -> WideValue:
    """the size of a member, the same for all members"""
    return Shared(w.call("sym_size.int", x.value, 1 + dim % x.rank))


@strategy("sym_numel", "shape", family="shape")
def sym_numel(w: Writer, x: Stacked) -> WideValue:
    """the number of elements of a member, the same for all members"""
    return Shared(w.call("operator.floordiv", w.call("sym_numel", x.value), w.members))


# `empty_like` becomes zeros, which are the same on every run
_LIKE = {"zeros_like": "new_zeros", "ones_like": "new_ones", "empty_like": "new_zeros"}


@strategy("zeros_like ones_like empty_like", "sizes", family="shape")
def like(w: Writer, x: Stacked, *, dtype: torch.dtype | None = None, **_: Any) -> WideValue:
    """depends on sizes alone: Shared"""
    return Shared(w.call(_LIKE[w.op.split(".")[1]], x.value, w.sizes(x), dtype=dtype))


@strategy("full_like", "sizes", family="shape")
def full_like(w: Writer, x: Stacked, fill: Any, *, dtype: torch.dtype | None = None, **_: Any) -> WideValue:
    """depends on sizes alone: Shared"""
    return Shared(w.call("new_full", x.value, w.sizes(x), put_shared(fill), dtype=dtype or x.value.dtype))


@strategy("new_zeros new_ones new_full new_empty", "sizes", family="shape")
def new(
    w: Writer, x: Stacked, size: list[Any], *args: Any, dtype: torch.dtype | None = None, **_: Any
) -> WideValue:
    """depends on sizes alone: Shared"""
    op = "new_zeros" if "new_empty" in w.op else w.op
    return Shared(w.call(op, x.value, put_shared(size), *put_shared(args), dtype=dtype or x.value.dtype))


@strategy("fill.Scalar", "sizes", family="shape")
def fill(w: Writer, x: Stacked, value: Any) -> WideValue:
    """depends on sizes alone: Shared"""
    return Shared(w.call("new_full", x.value, w.sizes(x), put_shared(value), dtype=x.value.dtype))


@strategy("fill.Tensor", "expand", family="shape")
def fill_tensor(w: Writer, x: WideValue, value: WideValue) -> WideValue:
    """expands the number to the sizes of x, in the dtype of x"""
    filled: WideValue = copy(w, x, value)
    return filled


@strategy("copy", "expand", family="shape")
def copy(w: Writer, x: WideValue, source: WideValue, non_blocking: bool = False) -> WideValue:
    """the source in the shape and dtype of x"""
    dtype = x.value.dtype  # type: ignore[union-attr]
    if isinstance(source, Stacked):
        value = w.call("expand", w.align(source, rank(x)), [w.members, *w.sizes(x)])
        return Stacked(w.call("_to_copy", value, dtype=dtype) if value.dtype != dtype else value)
    value = w.call("expand", source.value, w.sizes(x))  # type: ignore[union-attr]
    return Shared(w.call("_to_copy", value, dtype=dtype) if value.dtype != dtype else value)


@strategy("type_as", "cast", family="shape")
def type_as(w: Writer, x: WideValue, other: WideValue) -> WideValue:
    """takes the dtype of the other value"""
    value = w.call("_to_copy", x.value, dtype=other.value.dtype)  # type: ignore[union-attr]
    return Stacked(value) if isinstance(x, Stacked) else Shared(value)
