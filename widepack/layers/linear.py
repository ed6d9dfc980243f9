"""Faces of linear layers: y[i] = x[i] W[i]^T + b[i], bilinear ones, and PReLU, a slope a channel."""

from __future__ import annotations

from torch import Tensor, nn

from .base import Face


class WideLinear(Face):
    """N `nn.Linear`: [N, *, I] -> [N, *, O]."""

    member = nn.Linear
    ops = ("linear",)

    def wide(self, input: Tensor) -> Tensor:
        return self.run("linear", input, self.weight, self.bias)  # type: ignore[no-any-return]


class WideBilinear(Face):
    """N `nn.Bilinear`: [N, *, I1], [N, *, I2] -> [N, *, O]."""

    member = nn.Bilinear
    ops = ("bilinear",)

    def wide(self, input1: Tensor, input2: Tensor) -> Tensor:
        return self.run("bilinear", input1, input2, self.weight, self.bias)  # type: ignore[no-any-return]


class WidePReLU(Face):
    """N `nn.PReLU`: [N, B, C, *] -> the same."""

    member = nn.PReLU
    ops = ("prelu",)

    def wide(self, input: Tensor) -> Tensor:
        return self.run("prelu", input, self.weight)  # type: ignore[no-any-return]
