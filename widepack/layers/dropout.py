"""Defines the wide layers of dropout.

In train mode each member draws its own numbers. In eval mode the layers return their input. They ignore
`inplace`: the output always has its own memory.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from .base import WideLayer


class _Dropout(WideLayer):
    draws = True
    excluded_strategies = frozenset({"rest"})  # what dropout is in eval mode
    unbatched_rank: ClassVar[int] = (
        0  # the rank of the layer's input without a batch; 0 where a batch is required
    )

    def wide(self, input: Tensor) -> Tensor:
        p: float = self.options.p
        if not self.training or p == 0:
            return input
        unbatched = input.ndim == self.unbatched_rank
        y: Tensor = self.run(self.ops[0], input.unsqueeze(1) if unbatched else input, p, True)
        return y.squeeze(1) if unbatched else y


class WideDropout(_Dropout):
    """N `nn.Dropout` as one module.

    Shape:
        Input `[N, *]`; output the same.
    """

    ops = ("dropout",)


class WideDropout1d(_Dropout):
    """N `nn.Dropout1d` as one module. It drops whole channels.

    Shape:
        Input `[N, B, C, L]` or `[N, C, L]`; output the same.
    """

    ops, unbatched_rank = ("feature_dropout",), 3


class WideDropout2d(_Dropout):
    """N `nn.Dropout2d` as one module. It drops whole channels, also of `[N, B, C, L]`, as the module does.

    Shape:
        Input `[N, B, C, H, W]`; output the same.
    """

    ops = ("feature_dropout",)


class WideDropout3d(_Dropout):
    """N `nn.Dropout3d` as one module. It drops whole channels.

    Shape:
        Input `[N, B, C, D, H, W]` or `[N, C, D, H, W]`; output the same.
    """

    ops, unbatched_rank = ("feature_dropout",), 5


class WideAlphaDropout(_Dropout):
    """N `nn.AlphaDropout` as one module. It keeps mean and variance.

    Shape:
        Input `[N, *]`; output the same.
    """

    ops = ("alpha_dropout",)


class WideFeatureAlphaDropout(_Dropout):
    """N `nn.FeatureAlphaDropout` as one module. It drops whole channels, and keeps mean and variance.

    Shape:
        Input `[N, B, C, *]`; output the same.
    """

    ops = ("feature_alpha_dropout",)
