"""Defines the wide layers of pooling: `[N, B, C, *s]` or `[N, C, *s]` to the same with other sizes.

They have no weights. They exist so that a user can write a wide network layer by layer.
"""

from __future__ import annotations

from typing import Any

from .arguments import option_list
from .base import WideLayer


class _MaxPool(WideLayer):
    ops = ("max_pool{n}d", "max_pool{n}d_with_indices")

    def wide(self, input: Any) -> Any:
        m, n = self.options, self.spatial
        op = self.ops[1 if m.return_indices else 0]
        window = (option_list(v, n) for v in (m.kernel_size, m.stride, m.padding, m.dilation))
        return self.run(op, input, *window, m.ceil_mode)


class _AvgPool(WideLayer):
    ops = ("avg_pool{n}d",)

    def wide(self, input: Any) -> Any:
        m, n = self.options, self.spatial
        window = (option_list(v, n) for v in (m.kernel_size, m.stride, m.padding))
        divisor = [m.divisor_override] if n > 1 else []
        return self.run(self.ops[0], input, *window, m.ceil_mode, m.count_include_pad, *divisor)


class _Adaptive(WideLayer):
    """Adaptive pooling. An output size of None is the input's size."""

    def wide(self, input: Any) -> Any:
        n = self.spatial
        option = self.options.output_size
        wanted = list(option) if isinstance(option, (list, tuple)) else [option] * n
        sizes = [input.shape[d - n] if size is None else size for d, size in enumerate(wanted)]
        output = self.run(self.ops[0], input, sizes)
        return output[0] if isinstance(output, tuple) and not self.options.return_indices else output


class WideMaxPool1d(_MaxPool):
    """N `nn.MaxPool1d` as one module.

    With `return_indices` it returns the indices of the maxima too.

    Shape:
        Input `[N, B, C, L]`; output `[N, B, C, L']`.
    """


class WideMaxPool2d(_MaxPool):
    """N `nn.MaxPool2d` as one module.

    With `return_indices` it returns the indices of the maxima too.

    Shape:
        Input `[N, B, C, H, W]`; output `[N, B, C, H', W']`.
    """


class WideMaxPool3d(_MaxPool):
    """N `nn.MaxPool3d` as one module.

    With `return_indices` it returns the indices of the maxima too.

    Shape:
        Input `[N, B, C, D, H, W]`; output `[N, B, C, D', H', W']`.
    """


class WideAvgPool1d(_AvgPool):
    """N `nn.AvgPool1d` as one module.

    Shape:
        Input `[N, B, C, L]`; output `[N, B, C, L']`.
    """


class WideAvgPool2d(_AvgPool):
    """N `nn.AvgPool2d` as one module.

    Shape:
        Input `[N, B, C, H, W]`; output `[N, B, C, H', W']`.
    """


class WideAvgPool3d(_AvgPool):
    """N `nn.AvgPool3d` as one module.

    Shape:
        Input `[N, B, C, D, H, W]`; output `[N, B, C, D', H', W']`.
    """


class _AdaptiveAvg(_Adaptive):
    ops = ("adaptive_avg_pool{n}d",)


class _AdaptiveMax(_Adaptive):
    ops = ("adaptive_max_pool{n}d",)


class WideAdaptiveAvgPool1d(_AdaptiveAvg):
    """N `nn.AdaptiveAvgPool1d` as one module.

    Shape:
        Input `[N, B, C, L]`; output `[N, B, C, L']`.
    """


class WideAdaptiveAvgPool2d(_AdaptiveAvg):
    """N `nn.AdaptiveAvgPool2d` as one module.

    Shape:
        Input `[N, B, C, H, W]`; output `[N, B, C, H', W']`.
    """


class WideAdaptiveAvgPool3d(_AdaptiveAvg):
    """N `nn.AdaptiveAvgPool3d` as one module.

    Shape:
        Input `[N, B, C, D, H, W]`; output `[N, B, C, D', H', W']`.
    """


class WideAdaptiveMaxPool1d(_AdaptiveMax):
    """N `nn.AdaptiveMaxPool1d` as one module.

    With `return_indices` it returns the indices of the maxima too.

    Shape:
        Input `[N, B, C, L]`; output `[N, B, C, L']`.
    """


class WideAdaptiveMaxPool2d(_AdaptiveMax):
    """N `nn.AdaptiveMaxPool2d` as one module.

    With `return_indices` it returns the indices of the maxima too.

    Shape:
        Input `[N, B, C, H, W]`; output `[N, B, C, H', W']`.
    """


class WideAdaptiveMaxPool3d(_AdaptiveMax):
    """N `nn.AdaptiveMaxPool3d` as one module.

    With `return_indices` it returns the indices of the maxima too.

    Shape:
        Input `[N, B, C, D, H, W]`; output `[N, B, C, D', H', W']`.
    """
