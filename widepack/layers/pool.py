"""Defines the wide layers of pooling: `[N, B, C, *s]` or `[N, C, *s]` to the same with other sizes.

They have no weights. They exist so that a user can write a wide network layer by layer.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from .arguments import option_list
from .base import WideLayer


class _MaxPool(WideLayer):
    spatial: ClassVar[int]

    def wide(self, input: Any) -> Any:
        m, n = self.options, self.spatial
        op = self.ops[1 if m.return_indices else 0]
        window = (option_list(v, n) for v in (m.kernel_size, m.stride, m.padding, m.dilation))
        return self.run(op, input, *window, m.ceil_mode)


class _AvgPool(WideLayer):
    spatial: ClassVar[int]

    def wide(self, input: Any) -> Any:
        m, n = self.options, self.spatial
        window = (option_list(v, n) for v in (m.kernel_size, m.stride, m.padding))
        divisor = [m.divisor_override] if n > 1 else []
        return self.run(self.ops[0], input, *window, m.ceil_mode, m.count_include_pad, *divisor)


class _Adaptive(WideLayer):
    """Adaptive pooling. An output size of None is the input's size."""

    spatial: ClassVar[int]

    def wide(self, input: Any) -> Any:
        n = self.spatial
        option = self.options.output_size
        wanted = list(option) if isinstance(option, (list, tuple)) else [option] * n
        sizes = [input.shape[d - n] if size is None else size for d, size in enumerate(wanted)]
        answer = self.run(self.ops[0], input, sizes)
        return answer[0] if isinstance(answer, tuple) and not self.options.return_indices else answer


class WideMaxPool1d(_MaxPool):
    """N `nn.MaxPool1d` as one module.

    With `return_indices` it returns the indices of the maxima too.

    Shape:
        Input `[N, B, C, L]`; output `[N, B, C, L']`.
    """

    member, ops, spatial = nn.MaxPool1d, ("max_pool1d", "max_pool1d_with_indices"), 1


class WideMaxPool2d(_MaxPool):
    """N `nn.MaxPool2d` as one module.

    With `return_indices` it returns the indices of the maxima too.

    Shape:
        Input `[N, B, C, H, W]`; output `[N, B, C, H', W']`.
    """

    member, ops, spatial = nn.MaxPool2d, ("max_pool2d", "max_pool2d_with_indices"), 2


class WideMaxPool3d(_MaxPool):
    """N `nn.MaxPool3d` as one module.

    With `return_indices` it returns the indices of the maxima too.

    Shape:
        Input `[N, B, C, D, H, W]`; output `[N, B, C, D', H', W']`.
    """

    member, ops, spatial = nn.MaxPool3d, ("max_pool3d", "max_pool3d_with_indices"), 3


class WideAvgPool1d(_AvgPool):
    """N `nn.AvgPool1d` as one module.

    Shape:
        Input `[N, B, C, L]`; output `[N, B, C, L']`.
    """

    member, ops, spatial = nn.AvgPool1d, ("avg_pool1d",), 1


class WideAvgPool2d(_AvgPool):
    """N `nn.AvgPool2d` as one module.

    Shape:
        Input `[N, B, C, H, W]`; output `[N, B, C, H', W']`.
    """

    member, ops, spatial = nn.AvgPool2d, ("avg_pool2d",), 2


class WideAvgPool3d(_AvgPool):
    """N `nn.AvgPool3d` as one module.

    Shape:
        Input `[N, B, C, D, H, W]`; output `[N, B, C, D', H', W']`.
    """

    member, ops, spatial = nn.AvgPool3d, ("avg_pool3d",), 3


class WideAdaptiveAvgPool1d(_Adaptive):
    """N `nn.AdaptiveAvgPool1d` as one module.

    Shape:
        Input `[N, B, C, L]`; output `[N, B, C, L']`.
    """

    member, ops, spatial = nn.AdaptiveAvgPool1d, ("adaptive_avg_pool1d",), 1


class WideAdaptiveAvgPool2d(_Adaptive):
    """N `nn.AdaptiveAvgPool2d` as one module.

    Shape:
        Input `[N, B, C, H, W]`; output `[N, B, C, H', W']`.
    """

    member, ops, spatial = nn.AdaptiveAvgPool2d, ("adaptive_avg_pool2d",), 2


class WideAdaptiveAvgPool3d(_Adaptive):
    """N `nn.AdaptiveAvgPool3d` as one module.

    Shape:
        Input `[N, B, C, D, H, W]`; output `[N, B, C, D', H', W']`.
    """

    member, ops, spatial = nn.AdaptiveAvgPool3d, ("adaptive_avg_pool3d",), 3


class WideAdaptiveMaxPool1d(_Adaptive):
    """N `nn.AdaptiveMaxPool1d` as one module.

    With `return_indices` it returns the indices of the maxima too.

    Shape:
        Input `[N, B, C, L]`; output `[N, B, C, L']`.
    """

    member, ops, spatial = nn.AdaptiveMaxPool1d, ("adaptive_max_pool1d",), 1


class WideAdaptiveMaxPool2d(_Adaptive):
    """N `nn.AdaptiveMaxPool2d` as one module.

    With `return_indices` it returns the indices of the maxima too.

    Shape:
        Input `[N, B, C, H, W]`; output `[N, B, C, H', W']`.
    """

    member, ops, spatial = nn.AdaptiveMaxPool2d, ("adaptive_max_pool2d",), 2


class WideAdaptiveMaxPool3d(_Adaptive):
    """N `nn.AdaptiveMaxPool3d` as one module.

    With `return_indices` it returns the indices of the maxima too.

    Shape:
        Input `[N, B, C, D, H, W]`; output `[N, B, C, D', H', W']`.
    """

    member, ops, spatial = nn.AdaptiveMaxPool3d, ("adaptive_max_pool3d",), 3
