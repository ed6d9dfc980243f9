"""Faces of pooling: [N, B, C, *s] or [N, C, *s] -> the same with other sizes. They have no numbers of their own, and stand here so that a wide network can be written layer by layer."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from .base import Face, numbers


class _MaxPool(Face):
    spatial: ClassVar[int]

    def wide(self, input: Any) -> Any:
        m, n = self.options, self.spatial
        op = self.ops[1 if m.return_indices else 0]
        return self.run(op, input, *(numbers(v, n) for v in (m.kernel_size, m.stride, m.padding, m.dilation)), m.ceil_mode)


class WideMaxPool1d(_MaxPool):
    """N `nn.MaxPool1d`: [N, B, C, L] -> [N, B, C, L'], with `return_indices` their places too."""

    member, ops, spatial = nn.MaxPool1d, ("max_pool1d", "max_pool1d_with_indices"), 1


class WideMaxPool2d(_MaxPool):
    """N `nn.MaxPool2d`: [N, B, C, H, W] -> [N, B, C, H', W'], with `return_indices` their places too."""

    member, ops, spatial = nn.MaxPool2d, ("max_pool2d", "max_pool2d_with_indices"), 2


class WideMaxPool3d(_MaxPool):
    """N `nn.MaxPool3d`: [N, B, C, D, H, W] -> [N, B, C, D', H', W'], with `return_indices` their places too."""

    member, ops, spatial = nn.MaxPool3d, ("max_pool3d", "max_pool3d_with_indices"), 3


class _AvgPool(Face):
    spatial: ClassVar[int]

    def wide(self, input: Any) -> Any:
        m, n = self.options, self.spatial
        divisor = [m.divisor_override] if n > 1 else []
        return self.run(
            self.ops[0], input, *(numbers(v, n) for v in (m.kernel_size, m.stride, m.padding)), m.ceil_mode, m.count_include_pad, *divisor
        )


class WideAvgPool1d(_AvgPool):
    """N `nn.AvgPool1d`: [N, B, C, L] -> [N, B, C, L']."""

    member, ops, spatial = nn.AvgPool1d, ("avg_pool1d",), 1


class WideAvgPool2d(_AvgPool):
    """N `nn.AvgPool2d`: [N, B, C, H, W] -> [N, B, C, H', W']."""

    member, ops, spatial = nn.AvgPool2d, ("avg_pool2d",), 2


class WideAvgPool3d(_AvgPool):
    """N `nn.AvgPool3d`: [N, B, C, D, H, W] -> [N, B, C, D', H', W']."""

    member, ops, spatial = nn.AvgPool3d, ("avg_pool3d",), 3


class _Adaptive(Face):
    """An output size of None is the input's own."""

    spatial: ClassVar[int]

    def wide(self, input: Any) -> Any:
        n = self.spatial
        given = self.options.output_size
        asked = list(given) if isinstance(given, (list, tuple)) else [given] * n
        made = self.run(self.ops[0], input, [input.shape[d - n] if size is None else size for d, size in enumerate(asked)])
        return made[0] if isinstance(made, tuple) and not self.options.return_indices else made


class WideAdaptiveAvgPool1d(_Adaptive):
    """N `nn.AdaptiveAvgPool1d`: [N, B, C, L] -> [N, B, C, L']."""

    member, ops, spatial = nn.AdaptiveAvgPool1d, ("adaptive_avg_pool1d",), 1


class WideAdaptiveAvgPool2d(_Adaptive):
    """N `nn.AdaptiveAvgPool2d`: [N, B, C, H, W] -> [N, B, C, H', W']."""

    member, ops, spatial = nn.AdaptiveAvgPool2d, ("adaptive_avg_pool2d",), 2


class WideAdaptiveAvgPool3d(_Adaptive):
    """N `nn.AdaptiveAvgPool3d`: [N, B, C, D, H, W] -> [N, B, C, D', H', W']."""

    member, ops, spatial = nn.AdaptiveAvgPool3d, ("adaptive_avg_pool3d",), 3


class WideAdaptiveMaxPool1d(_Adaptive):
    """N `nn.AdaptiveMaxPool1d`: [N, B, C, L] -> [N, B, C, L'], with `return_indices` their places too."""

    member, ops, spatial = nn.AdaptiveMaxPool1d, ("adaptive_max_pool1d",), 1


class WideAdaptiveMaxPool2d(_Adaptive):
    """N `nn.AdaptiveMaxPool2d`: [N, B, C, H, W] -> [N, B, C, H', W'], with `return_indices` their places too."""

    member, ops, spatial = nn.AdaptiveMaxPool2d, ("adaptive_max_pool2d",), 2


class WideAdaptiveMaxPool3d(_Adaptive):
    """N `nn.AdaptiveMaxPool3d`: [N, B, C, D, H, W] -> [N, B, C, D', H', W'], with `return_indices` their places too."""

    member, ops, spatial = nn.AdaptiveMaxPool3d, ("adaptive_max_pool3d",), 3
