"""Convolutions as the members' own convolutions, on several streams in a CUDA graph.

    y[i] = conv(x[i], W[i]) + b[i]    x: [N, B, C, *s]    W: [N, O, C/g, *k]    y: [N, B, O, *s']

A GPU runs one convolution of N groups at a part of the rate of N convolutions (planning/cuda_costs.py). The
op (kernels/member_convs.py) starts N kernels, so a kernel of a member must take longer than its start.
"""

from __future__ import annotations

from typing import Any

from ..ir.values import Stacked, WideValue
from ..registry.registry import strategy
from ..registry.writer import Writer
from .conv import CONV, batched, fixed_numbers
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
