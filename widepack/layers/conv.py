"""Defines the wide convolutions and transposed convolutions. Inputs are `[N, B, C, *s]` or `[N, C, *s]`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import UsageError
from ..ir.encoding import type_of
from .arguments import option_list
from .base import WideLayer


class _Conv(WideLayer):
    ops = ("conv{n}d",)

    def wide(self, input: Tensor) -> Tensor:
        m, n = self.options, self.spatial
        self._refuse_training_on_one_image(input)
        op, padding = f"conv{n}d", m.padding
        if m.padding_mode != "zeros":
            sizes = list(m._reversed_padding_repeated_twice)  # torch has no public name for it
            input = self.run("pad", input, sizes, m.padding_mode, main=False)
            padding = 0
        elif isinstance(padding, str):
            op += ".padding"
        pads = padding if isinstance(padding, str) else option_list(padding, n)
        stride, dilation = option_list(m.stride, n), option_list(m.dilation, n)
        return self.run(op, input, self.weight, self.bias, stride, pads, dilation, m.groups)  # type: ignore[no-any-return]

    def _refuse_training_on_one_image(self, input: Tensor) -> None:
        """Raises UsageError where torch would take a gradient in one memory order for the other.

        The memory order of one image is ambiguous after a view. The gradient of a batch norm beside the
        convolution would be wrong.
        """
        images = input.shape[1] if input.dim() == self.spatial + 3 else 1
        trains = torch.is_grad_enabled() and (input.requires_grad or self.weight.requires_grad)
        if trains and images == 1 and self.strategy == "grouped_channels_last":
            raise UsageError(
                f"{self.name} with strategy 'grouped_channels_last' does not train on one image for each "
                f"member, input {type_of(input)}: gradients of norms would be wrong in this memory order. "
                "Use strategy 'auto' or 'grouped', or two images or more"
            )


class WideConv1d(_Conv):
    """N `nn.Conv1d` as one module.

    Shape:
        Input `[N, B, C, L]` or `[N, C, L]`; output `[N, B, O, L']` or `[N, O, L']`.
    """


class WideConv2d(_Conv):
    """N `nn.Conv2d` as one module.

    Shape:
        Input `[N, B, C, H, W]` or `[N, C, H, W]`; output `[N, B, O, H', W']` or `[N, O, H', W']`.
    """


class WideConv3d(_Conv):
    """N `nn.Conv3d` as one module.

    Shape:
        Input `[N, B, C, D, H, W]` or `[N, C, D, H, W]`; output `[N, B, O, D', H', W']` or `[N, O, D', H',
        W']`.
    """


class _Transposed(WideLayer):
    def wide(self, input: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        m, n = self.options, self.spatial
        member_sizes = m.stride, m.padding, m.kernel_size, n, m.dilation
        wanted = m._output_padding(input[0], output_size, *member_sizes)  # torch has no public name for it
        output_padding = option_list(wanted, n)
        stride, padding, dilation = (option_list(v, n) for v in (m.stride, m.padding, m.dilation))
        rest = stride, padding, output_padding, m.groups, dilation
        return self.run(self.ops[0], input, self.weight, self.bias, *rest)  # type: ignore[no-any-return]


class WideConvTranspose1d(_Transposed):
    """N `nn.ConvTranspose1d` as one module.

    Shape:
        Input `[N, B, C, L]` or `[N, C, L]`; output `[N, B, O, L']` or `[N, O, L']`.
    """

    ops = ("conv_transpose1d",)


class WideConvTranspose2d(_Transposed):
    """N `nn.ConvTranspose2d` as one module.

    Shape:
        Input `[N, B, C, H, W]` or `[N, C, H, W]`; output `[N, B, O, H', W']` or `[N, O, H', W']`.
    """

    ops = ("conv_transpose2d.input",)


class WideConvTranspose3d(_Transposed):
    """N `nn.ConvTranspose3d` as one module.

    Shape:
        Input `[N, B, C, D, H, W]` or `[N, C, D, H, W]`; output `[N, B, O, D', H', W']` or `[N, O, D', H',
        W']`.
    """

    ops = ("conv_transpose3d.input",)
