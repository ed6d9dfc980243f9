"""Faces of dropout: in train mode each member draws for itself, in eval mode they give their input. `inplace` is left aside: the answer has memory of its own."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from .base import Face


class _Dropout(Face):
    draws = True
    without = frozenset({"rest"})  # what dropout is in eval mode
    batched: ClassVar[int] = 0  # the member's rank of an input with a batch, where there may be none

    def wide(self, input: Tensor) -> Tensor:
        p: float = self.options.p
        if not self.training or p == 0:
            return input
        alone = input.ndim == self.batched  # the face's rank of one without
        made: Tensor = self.run(self.ops[0], input.unsqueeze(1) if alone else input, p, True)
        return made.squeeze(1) if alone else made


class WideDropout(_Dropout):
    """N `nn.Dropout`: [N, *] -> the same."""

    member, ops = nn.Dropout, ("dropout",)


class WideDropout1d(_Dropout):
    """N `nn.Dropout1d`, whole channels: [N, B, C, L] or [N, C, L] -> the same."""

    member, ops, batched = nn.Dropout1d, ("feature_dropout",), 3


class WideDropout2d(_Dropout):
    """N `nn.Dropout2d`, whole channels: [N, B, C, H, W] -> the same. Of [N, B, C, L] it drops channels too, as the module does."""

    member, ops = nn.Dropout2d, ("feature_dropout",)


class WideDropout3d(_Dropout):
    """N `nn.Dropout3d`, whole channels: [N, B, C, D, H, W] or [N, C, D, H, W] -> the same."""

    member, ops, batched = nn.Dropout3d, ("feature_dropout",), 5


class WideAlphaDropout(_Dropout):
    """N `nn.AlphaDropout`, mean and variance kept: [N, *] -> the same."""

    member, ops = nn.AlphaDropout, ("alpha_dropout",)


class WideFeatureAlphaDropout(_Dropout):
    """N `nn.FeatureAlphaDropout`, whole channels: [N, B, C, *] -> the same."""

    member, ops = nn.FeatureAlphaDropout, ("feature_alpha_dropout",)
