"""Defines the wide layers of normalization.

Batch and instance norms that track statistics update each member's own `running_mean` and `running_var`, `[N,
C]`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .arguments import Form
from .base import WideLayer


class WideLayerNorm(WideLayer):
    """N `nn.LayerNorm` as one module.

    Shape:
        Input `[N, *, *normalized_shape]`; output the same.
    """

    ops = ("layer_norm",)

    def wide(self, input: Tensor) -> Tensor:
        m = self.options
        return self.run("layer_norm", input, list(m.normalized_shape), self.weight, self.bias, m.eps)  # type: ignore[no-any-return]


class WideRMSNorm(WideLayer):
    """N `nn.RMSNorm` as one module.

    Shape:
        Input `[N, *, *normalized_shape]`; output the same.
    """

    ops = ("rms_norm",)

    def wide(self, input: Tensor) -> Tensor:
        m = self.options
        return self.run("rms_norm", input, list(m.normalized_shape), self.weight, m.eps)  # type: ignore[no-any-return]


class WideGroupNorm(WideLayer):
    """N `nn.GroupNorm` as one module.

    Shape:
        Input `[N, B, C, *]`; output the same.
    """

    ops = ("group_norm",)

    def wide(self, input: Tensor) -> Tensor:
        m = self.options
        return self.run("group_norm", input, m.num_groups, self.weight, self.bias, m.eps)  # type: ignore[no-any-return]


class _InstanceNorm(WideLayer):
    ops = ("instance_norm",)

    def wide(self, input: Tensor) -> Tensor:
        m = self.options
        unbatched = input.ndim == self.spatial + 2
        x = input.unsqueeze(1) if unbatched else input
        use_input_stats = self.training or not m.track_running_stats
        momentum = 0.0 if m.momentum is None else m.momentum
        y: Tensor = self.run(
            "instance_norm",
            x,
            self.weight,
            self.bias,
            self.running_mean,
            self.running_var,
            use_input_stats,
            momentum,
            m.eps,
            torch.backends.cudnn.enabled,
        )
        return y.squeeze(1) if unbatched else y


class WideInstanceNorm1d(_InstanceNorm):
    """N `nn.InstanceNorm1d` as one module.

    Shape:
        Input `[N, B, C, L]` or `[N, C, L]`; output the same.
    """


class WideInstanceNorm2d(_InstanceNorm):
    """N `nn.InstanceNorm2d` as one module.

    Shape:
        Input `[N, B, C, H, W]` or `[N, C, H, W]`; output the same.
    """


class WideInstanceNorm3d(_InstanceNorm):
    """N `nn.InstanceNorm3d` as one module.

    Shape:
        Input `[N, B, C, D, H, W]` or `[N, C, D, H, W]`; output the same.
    """


_EVAL, _TRAIN, _WITHOUT_STATS = (
    "_native_batch_norm_legit_no_training",
    "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit.no_stats",
)


class _BatchNorm(WideLayer):
    """Batch norm for all members.

    In eval mode it uses the running statistics. In train mode, or without running statistics, it uses those
    of each member's own batch.
    """

    ops = (_EVAL, _TRAIN, _WITHOUT_STATS)

    def wide(self, input: Tensor) -> Tensor:
        m: Any = self.options
        mean: Any = self.running_mean
        var: Any = self.running_var
        if not input.numel():
            return self._empty_batch(input)
        if not self.training and mean is not None:
            return self.run(_EVAL, input, self.weight, self.bias, mean, var, m.momentum or 0.0, m.eps)[0]  # type: ignore[no-any-return]
        if not self.training or mean is None:
            return self.run(_WITHOUT_STATS, input, self.weight, self.bias, True, 0.0, m.eps)[0]  # type: ignore[no-any-return]
        # without a momentum the op returns this batch's statistics, and the mean over all batches is taken
        # below
        momentum = 1.0 if m.momentum is None else m.momentum
        before = mean.clone(), var.clone()  # the backward reads them again
        y, _, _, new_mean, new_var = self.run(
            _TRAIN, input, self.weight, self.bias, *before, True, momentum, m.eps
        )
        with torch.no_grad():
            count: Any = self.num_batches_tracked
            count.add_(1)
            for running, new in ((mean, new_mean), (var, new_var)):
                if m.momentum is None:
                    share = (1.0 / count.to(running.dtype)).unsqueeze(-1)  # [N, 1]
                    new = running * (1 - share) + new * share
                running.copy_(new)
        return y  # type: ignore[no-any-return]

    def _empty_batch(self, input: Tensor) -> Tensor:
        """Returns an empty batch as the module does: it counts the batch, and the statistics do not change.

        The ops above refuse an empty batch, or divide by its size in the backward.
        """
        if self.training and self.running_mean is not None:
            self.num_batches_tracked.add_(1)  # type: ignore[operator]
        parameters: list[Any] = [self.weight, self.bias]
        if parameters[0] is None:
            return input.clone()
        weight, bias = (p[:, 0].view(-1, *[1] * (input.ndim - 1)) for p in parameters)
        return input * weight + bias  # type: ignore[no-any-return]

    def _run_member_on_meta(self, weights: Any, args: Any, kwargs: Any) -> list[Form] | None:
        m, momentum = self.options, self.options.momentum
        m.momentum = 0.0 if momentum is None else momentum  # None reads the count, which has no value on meta
        try:
            return super()._run_member_on_meta(weights, args, kwargs)
        finally:
            m.momentum = momentum


class WideBatchNorm1d(_BatchNorm):
    """N `nn.BatchNorm1d` as one module.

    Shape:
        Input `[N, B, C]` or `[N, B, C, L]`; output the same.
    """


class WideBatchNorm2d(_BatchNorm):
    """N `nn.BatchNorm2d` as one module.

    Shape:
        Input `[N, B, C, H, W]`; output the same.
    """


class WideBatchNorm3d(_BatchNorm):
    """N `nn.BatchNorm3d` as one module.

    Shape:
        Input `[N, B, C, D, H, W]`; output the same.
    """
