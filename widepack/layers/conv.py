"""Faces of convolutions and transposed convolutions: x [N, B, C, *s] or [N, C, *s]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor, nn

from .base import Face, numbers


class _Conv(Face):
    spatial: ClassVar[int]

    def wide(self, input: Tensor) -> Tensor:
        m, n = self.options, self.spatial
        op, padding = f"conv{n}d", m.padding
        if m.padding_mode != "zeros":
            input = self.run("pad", input, list(m._reversed_padding_repeated_twice), m.padding_mode, main=False)
            padding = 0
        elif isinstance(padding, str):
            op += ".padding"
        given = padding if isinstance(padding, str) else numbers(padding, n)
        return self.run(op, input, self.weight, self.bias, numbers(m.stride, n), given, numbers(m.dilation, n), m.groups)  # type: ignore[no-any-return]


class WideConv1d(_Conv):
    """N `nn.Conv1d`: [N, B, C, L] -> [N, B, O, L']."""

    member, ops, spatial = nn.Conv1d, ("conv1d",), 1


class WideConv2d(_Conv):
    """N `nn.Conv2d`: [N, B, C, H, W] -> [N, B, O, H', W']."""

    member, ops, spatial = nn.Conv2d, ("conv2d",), 2


class WideConv3d(_Conv):
    """N `nn.Conv3d`: [N, B, C, D, H, W] -> [N, B, O, D', H', W']."""

    member, ops, spatial = nn.Conv3d, ("conv3d",), 3


class _Transposed(Face):
    spatial: ClassVar[int]

    def wide(self, input: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        m, n = self.options, self.spatial
        more = m._output_padding(input[0], output_size, m.stride, m.padding, m.kernel_size, n, m.dilation)
        rest = numbers(m.stride, n), numbers(m.padding, n), numbers(more, n), m.groups, numbers(m.dilation, n)
        return self.run(self.ops[0], input, self.weight, self.bias, *rest)  # type: ignore[no-any-return]


class WideConvTranspose1d(_Transposed):
    """N `nn.ConvTranspose1d`: [N, B, C, L] -> [N, B, O, L']."""

    member, ops, spatial = nn.ConvTranspose1d, ("conv_transpose1d",), 1


class WideConvTranspose2d(_Transposed):
    """N `nn.ConvTranspose2d`: [N, B, C, H, W] -> [N, B, O, H', W']."""

    member, ops, spatial = nn.ConvTranspose2d, ("conv_transpose2d.input",), 2


class WideConvTranspose3d(_Transposed):
    """N `nn.ConvTranspose3d`: [N, B, C, D, H, W] -> [N, B, O, D', H', W']."""

    member, ops, spatial = nn.ConvTranspose3d, ("conv_transpose3d.input",), 3
