"""Faces of norms. Batch and instance norms that track statistics update each member's own, `running_mean` and `running_var` [N, C]."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .base import Face


class WideLayerNorm(Face):
    """N `nn.LayerNorm`: [N, *, *normalized_shape] -> the same."""

    member, ops = nn.LayerNorm, ("layer_norm",)

    def wide(self, input: Tensor) -> Tensor:
        m = self.options
        return self.run("layer_norm", input, list(m.normalized_shape), self.weight, self.bias, m.eps)  # type: ignore[no-any-return]


class WideRMSNorm(Face):
    """N `nn.RMSNorm`: [N, *, *normalized_shape] -> the same."""

    member, ops = nn.RMSNorm, ("rms_norm",)

    def wide(self, input: Tensor) -> Tensor:
        m = self.options
        return self.run("rms_norm", input, list(m.normalized_shape), self.weight, m.eps)  # type: ignore[no-any-return]


class WideGroupNorm(Face):
    """N `nn.GroupNorm`: [N, B, C, *] -> the same."""

    member, ops = nn.GroupNorm, ("group_norm",)

    def wide(self, input: Tensor) -> Tensor:
        m = self.options
        return self.run("group_norm", input, m.num_groups, self.weight, self.bias, m.eps)  # type: ignore[no-any-return]


class _InstanceNorm(Face):
    ops = ("instance_norm",)
    spatial: ClassVar[int]

    def wide(self, input: Tensor) -> Tensor:
        m = self.options
        alone = input.ndim == self.spatial + 2  # no batch
        x = input.unsqueeze(1) if alone else input
        of_batch = self.training or not m.track_running_stats
        momentum = 0.0 if m.momentum is None else m.momentum
        made: Tensor = self.run(
            "instance_norm", x, self.weight, self.bias, self.running_mean, self.running_var, of_batch, momentum, m.eps, torch.backends.cudnn.enabled
        )
        return made.squeeze(1) if alone else made


class WideInstanceNorm1d(_InstanceNorm):
    """N `nn.InstanceNorm1d`: [N, B, C, L] or [N, C, L] -> the same."""

    member, spatial = nn.InstanceNorm1d, 1


class WideInstanceNorm2d(_InstanceNorm):
    """N `nn.InstanceNorm2d`: [N, B, C, H, W] or [N, C, H, W] -> the same."""

    member, spatial = nn.InstanceNorm2d, 2


class WideInstanceNorm3d(_InstanceNorm):
    """N `nn.InstanceNorm3d`: [N, B, C, D, H, W] or [N, C, D, H, W] -> the same."""

    member, spatial = nn.InstanceNorm3d, 3


_EVAL, _TRAIN, _OF_BATCH = "_native_batch_norm_legit_no_training", "_native_batch_norm_legit_functional", "_native_batch_norm_legit.no_stats"


class _BatchNorm(Face):
    """In eval mode by the statistics that were tracked; in train mode, or where none are, by those of the member's own batch."""

    ops = (_EVAL, _TRAIN, _OF_BATCH)

    def wide(self, input: Tensor) -> Tensor:
        m: Any = self.options
        mean: Any = self.running_mean
        var: Any = self.running_var
        if not input.numel():
            return self._of_nothing(input)
        if not self.training and mean is not None:
            return self.run(_EVAL, input, self.weight, self.bias, mean, var, m.momentum or 0.0, m.eps)[0]  # type: ignore[no-any-return]
        if not self.training or mean is None:
            return self.run(_OF_BATCH, input, self.weight, self.bias, True, 0.0, m.eps)[0]  # type: ignore[no-any-return]
        # of this batch alone where each member has its own share in the mean over all batches
        momentum = 1.0 if m.momentum is None else m.momentum
        before = mean.clone(), var.clone()  # the backward looks at them again
        made, _, _, new_mean, new_var = self.run(_TRAIN, input, self.weight, self.bias, *before, True, momentum, m.eps)
        with torch.no_grad():
            count: Any = self.num_batches_tracked
            count.add_(1)
            for held, new in ((mean, new_mean), (var, new_var)):
                if m.momentum is None:
                    share = (1.0 / count.to(held.dtype)).unsqueeze(-1)  # [N, 1]
                    new = held * (1 - share) + new * share
                held.copy_(new)
        return made  # type: ignore[no-any-return]

    def _of_nothing(self, input: Tensor) -> Tensor:
        """An empty batch: the module gives it back and counts it, statistics stay. (The ops above refuse it, or divide by its size in the backward.)"""
        if self.training and self.running_mean is not None:
            self.num_batches_tracked.add_(1)  # type: ignore[operator]
        parts: list[Any] = [self.weight, self.bias]
        if parts[0] is None:
            return input.clone()
        weight, bias = (p[:, 0].view(-1, *[1] * (input.ndim - 1)) for p in parts)
        return input * weight + bias  # type: ignore[no-any-return]

    def _alone(self, own: Any, args: Any, kwargs: Any) -> Any:
        m, momentum = self.options, self.options.momentum
        m.momentum = 0.0 if momentum is None else momentum  # a count without memory gives no share
        try:
            return super()._alone(own, args, kwargs)
        finally:
            m.momentum = momentum


class WideBatchNorm1d(_BatchNorm):
    """N `nn.BatchNorm1d`: [N, B, C] or [N, B, C, L] -> the same."""

    member = nn.BatchNorm1d


class WideBatchNorm2d(_BatchNorm):
    """N `nn.BatchNorm2d`: [N, B, C, H, W] -> the same."""

    member = nn.BatchNorm2d


class WideBatchNorm3d(_BatchNorm):
    """N `nn.BatchNorm3d`: [N, B, C, D, H, W] -> the same."""

    member = nn.BatchNorm3d
