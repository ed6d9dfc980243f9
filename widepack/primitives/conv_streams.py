"""Convolutions as the members' own convolutions, on several streams in a CUDA graph.

    y[i] = conv(x[i], W[i]) + b[i]    x: [N, B, C, *s]    W: [N, O, C/g, *k]    y: [N, B, O, *s']
    y[i] = conv_transpose(x[i], W[i]) + b[i]              W: [N, C, O/g, *k]

A GPU runs one convolution of N groups at a part of the rate of N convolutions (kernel_times/cuda.py). The
op (kernels/member_convs.py) starts N kernels, so a kernel of a member must take longer than its start.
"""

from __future__ import annotations

from typing import Any

from ..ir.values import Stacked, WideValue
from ..registry.registry import strategy
from ..registry.writer import Writer
from .conv import CONV, TRANSPOSED, batched, fixed_numbers, groups_of, per_dim
from .conv_patches import fits


@strategy(CONV, "streams", family="conv", when=fits, derivative=False)
def streams(
    w: Writer, x: Stacked, weight: Stacked, bias: WideValue | None = None, *args: Any, **kwargs: Any
) -> WideValue:
    """the members' own convolutions; in a CUDA graph on several streams, which fork and join"""
    fixed = fixed_numbers(w, args, kwargs, weight.value.sizes[3:])
    assert fixed is not None
    image, back = batched(w, x, weight)
    b = None if bias is None else w.stack(bias)
    y = w.call("widepack.member_convs.default", w.stack(image), weight.value, b, *fixed)
    return back(Stacked(y))  # type: ignore[no-any-return]


def _transposed_numbers(
    w: Writer, args: tuple[Any, ...], kwargs: dict[str, Any], spatial: int
) -> list[Any] | None:
    """Returns stride, padding, dilation, groups and output padding; None if some are not known at export."""
    (stride, padding, more, groups, dilation), _ = groups_of(w, args, kwargs, 3)
    lists = [per_dim(value, spatial) for value in (stride, padding, dilation, more)]
    if not isinstance(groups, int) or None in lists:
        return None
    return [*lists[:3], groups, lists[3]]


def _transposed_fits(
    w: Writer, x: WideValue, weight: WideValue, bias: WideValue | None = None, *args: Any, **kwargs: Any
) -> bool:
    """Whether input and weight are Stacked and the options are numbers."""
    if not isinstance(x, Stacked) or not isinstance(weight, Stacked) or not all(weight.value.sizes):
        return False
    return _transposed_numbers(w, args, kwargs, len(weight.value.sizes) - 3) is not None


@strategy(TRANSPOSED, "streams", family="conv", when=_transposed_fits, derivative=False)
def transposed_streams(
    w: Writer, x: Stacked, weight: Stacked, bias: WideValue | None = None, *args: Any, **kwargs: Any
) -> WideValue:
    """the members' own transposed convolutions; in a CUDA graph on several streams, which fork and join"""
    options = _transposed_numbers(w, args, kwargs, len(weight.value.sizes) - 3)
    assert options is not None
    image, back = batched(w, x, weight)
    b = None if bias is None else w.stack(bias)
    y = w.call("widepack.member_convs.default", w.stack(image), weight.value, b, *options)
    return back(Stacked(y))  # type: ignore[no-any-return]
