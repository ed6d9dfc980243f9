"""Defines the wide linear layers: `WideLinear`, `WideBilinear`, and `WidePReLU`."""

from __future__ import annotations

from torch import Tensor

from .base import WideLayer


class WideLinear(WideLayer):
    """N `nn.Linear` as one module: `y[i] = x[i] W[i]^T + b[i]`.

    Shape:
        Input `[N, *, I]`; output `[N, *, O]`; `weight` `[N, O, I]`; `bias` `[N, O]` or None.

    Example:
        >>> layer = WideLinear.from_modules([nn.Linear(64, 10) for _ in range(8)])
        >>> layer(torch.randn(8, 32, 64)).shape
        torch.Size([8, 32, 10])
    """

    ops = ("linear",)

    def wide(self, input: Tensor) -> Tensor:
        return self.run("linear", input, self.weight, self.bias)  # type: ignore[no-any-return]


class WideBilinear(WideLayer):
    """N `nn.Bilinear` as one module.

    Shape:
        Inputs `[N, *, I1]` and `[N, *, I2]`; output `[N, *, O]`.
    """

    ops = ("bilinear",)

    def wide(self, input1: Tensor, input2: Tensor) -> Tensor:
        return self.run("bilinear", input1, input2, self.weight, self.bias)  # type: ignore[no-any-return]


class WidePReLU(WideLayer):
    """N `nn.PReLU` as one module, with one slope, or one for each channel.

    Shape:
        Input `[N, B, C, *]`; output the same.
    """

    ops = ("prelu",)

    def wide(self, input: Tensor) -> Tensor:
        return self.run("prelu", input, self.weight)  # type: ignore[no-any-return]
