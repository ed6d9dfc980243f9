"""Patterns of everyday code: activations."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from networks.patterns.case import Case, case, chain, of
from networks.patterns.convolutions import I2
from networks.patterns.shapes import ROWS


class Activations(nn.Module):
    """Has every activation of torch.nn, each after the same layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 4)
        self.all = nn.ModuleList([
            nn.ReLU(), nn.ReLU6(), nn.LeakyReLU(0.2), nn.ELU(), nn.SELU(), nn.CELU(), nn.GELU(),
            nn.GELU("tanh"), nn.SiLU(), nn.Mish(), nn.Hardswish(),
            nn.Hardsigmoid(), nn.Hardtanh(), nn.Sigmoid(), nn.LogSigmoid(), nn.Tanh(), nn.Softplus(),
            nn.Softsign(), nn.Tanhshrink(), nn.Softshrink(),
            nn.Hardshrink(), nn.PReLU(), nn.PReLU(4), nn.RReLU(), nn.GLU(), nn.Threshold(0.1, 0.2),
            nn.Softmin(1), nn.Softmax(-1), nn.LogSoftmax(1),
            nn.Dropout(), nn.AlphaDropout(), nn.FeatureAlphaDropout(), nn.Identity(),
        ])  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([a(self.fc(x)) for a in self.all], -1)


CASES: dict[str, Case] = {
    "activations": case(Activations, ROWS),
    "prelu_image": case(
        chain(
            of(nn.Conv2d, 4, 6, 3),
            of(nn.PReLU, 6),
            of(nn.Dropout2d),
            of(nn.Conv2d, 6, 4, 1),
            of(nn.PReLU),
            of(nn.Softmax2d),
        ),
        I2,
    ),
}
