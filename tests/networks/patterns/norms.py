"""Patterns of everyday code: norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from networks.patterns.case import Case, Make, case, chain, linear, net, of, param
from networks.patterns.convolutions import I1, I2, I3
from networks.patterns.shapes import TEXT


class Functional(nn.Module):
    """Calls norms as functions, with buffers and parameters that have other names."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(4))
        self.register_buffer("running_var", torch.ones(4))
        self.g = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        y = F.batch_norm(
            x, self.get_buffer("running_mean"), self.get_buffer("running_var"), self.g, training=False
        )
        return (
            F.group_norm(F.layer_norm(y, y.shape[2:]), 2, self.g, -self.g)
            + F.instance_norm(x, weight=self.g)
            + F.local_response_norm(y, 2)
        )


def norm(kind: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> Make:
    """Makes a norm after a layer whose weights differ by member."""
    return chain(of(nn.Conv2d, 4, 4, 1), of(kind, *args, **kwargs))


CASES: dict[str, Case] = {
    "batch_norm1d": case(chain(linear(6, 5), of(nn.BatchNorm1d, 5), linear(5, 4)), "input=float32[B,6]"),
    "batch_norm1d_3d": case(chain(of(nn.Conv1d, 4, 6, 1), of(nn.BatchNorm1d, 6), of(nn.ReLU)), I1),
    "batch_norm_first": case(chain(of(nn.BatchNorm2d, 4), of(nn.Conv2d, 4, 5, 3)), I2),
    "batch_norm_plain": case(norm(nn.BatchNorm2d, 4, affine=False, eps=1e-3), I2),
    "batch_norm_no_statistics": case(norm(nn.BatchNorm2d, 4, track_running_stats=False), I2),
    "batch_norm_bare": case(norm(nn.BatchNorm2d, 4, affine=False, track_running_stats=False), I2),
    "batch_norm3d": case(chain(of(nn.Conv3d, 4, 5, 2), of(nn.BatchNorm3d, 5)), I3),
    "sync_batch_norm": case(norm(nn.SyncBatchNorm, 4), I2),
    "layer_norm": case(chain(of(nn.LayerNorm, 8), linear(8, 5)), "input=float32[B,T,8]"),
    "layer_norm_plain": case(
        chain(linear(8, 8), of(nn.LayerNorm, 8, elementwise_affine=False), linear(8, 5)),
        "input=float32[B,T,8]",
    ),
    "layer_norm_no_bias": case(
        chain(linear(8, 8), of(nn.LayerNorm, 8, bias=False, eps=1e-3)), "input=float32[B,T,8]"
    ),
    "layer_norm_image": case(
        chain(of(nn.Conv2d, 4, 5, 3), of(nn.LayerNorm, [5, 6, 4])), "input=float32[B,4,8,6]"
    ),
    "group_norm": case(norm(nn.GroupNorm, 2, 4), I2),
    "group_norm_plain": case(norm(nn.GroupNorm, 4, 4, affine=False), I2),
    "group_norm_in_chain": case(
        chain(of(nn.Conv2d, 4, 8, 3, groups=4), of(nn.GroupNorm, 4, 8), of(nn.SiLU), of(nn.Conv2d, 8, 4, 1)),
        I2,
    ),
    "instance_norm": case(norm(nn.InstanceNorm2d, 4), I2),
    "instance_norm_affine": case(norm(nn.InstanceNorm2d, 4, affine=True), I2),
    "instance_norm_tracked": case(norm(nn.InstanceNorm2d, 4, affine=True, track_running_stats=True), I2),
    "instance_norm1d": case(chain(of(nn.Conv1d, 4, 5, 1), of(nn.InstanceNorm1d, 5, affine=True)), I1),
    "rms_norm": case(chain(linear(8, 8), of(nn.RMSNorm, 8), linear(8, 5)), "input=float32[B,T,8]"),
    "rms_norm_by_hand": case(
        net(
            lambda self, x: (
                self.fc(x) * torch.rsqrt(self.fc(x).pow(2).mean(-1, keepdim=True) + 1e-6) * self.g
            ),
            fc=linear(8, 8),
            g=param(8),
        ),
        TEXT,
    ),
    "local_response_norm": case(norm(nn.LocalResponseNorm, 2), I2),
    "functional_norms": case(Functional, "x=float32[B,4,5,6]"),
    "weight_norm": case(
        chain(
            lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 5)),
            lambda: parametrizations.weight_norm(nn.Linear(5, 4), dim=1),
        ),
        "input=float32[B,6]",
    ),
    "weight_norm_conv": case(
        chain(
            lambda: parametrizations.weight_norm(nn.Conv1d(4, 6, 3)),
            lambda: parametrizations.weight_norm(nn.ConvTranspose1d(6, 4, 3), dim=1),
        ),
        I1,
    ),
    "weight_norm_whole": case(
        chain(lambda: parametrizations.weight_norm(nn.Linear(6, 5), dim=-1)), "input=float32[B,6]"
    ),
    "spectral_norm": case(
        chain(
            lambda: parametrizations.spectral_norm(nn.Linear(6, 5)),
            lambda: parametrizations.spectral_norm(nn.Linear(5, 4)),
        ),
        "input=float32[B,6]",
    ),
    "spectral_norm_conv": case(
        chain(
            lambda: parametrizations.spectral_norm(nn.Conv2d(4, 6, 3)),
            lambda: nn.utils.spectral_norm(nn.Conv2d(6, 4, 1)),
        ),
        I2,
    ),
    "orthogonal": case(
        chain(lambda: parametrizations.orthogonal(nn.Linear(6, 6), orthogonal_map="cayley")),
        "input=float32[B,6]",
    ),
}
