"""Patterns of everyday code: losses in forward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from networks.patterns.case import Case, case, linear, net, param
from networks.patterns.shapes import ROWS


def losses(self: Any, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    p = self.fc(x)
    q = y.sigmoid()
    return {
        "mse": F.mse_loss(p, y),
        "mse_rows": F.mse_loss(p, y, reduction="none"),
        "l1": F.l1_loss(p, y, reduction="sum"),
        "smooth": F.smooth_l1_loss(p, y, beta=0.5),
        "huber": F.huber_loss(p, y),
        "bce": F.binary_cross_entropy(p.sigmoid(), q),
        "logits": F.binary_cross_entropy_with_logits(p, q, pos_weight=self.w),
        "margin": F.soft_margin_loss(p, y.sign()),
        "divergence": F.kl_div(p.log_softmax(-1), y.softmax(-1), reduction="batchmean"),
        "poisson": F.poisson_nll_loss(p, q),
        "cosine": F.cosine_embedding_loss(p, y, y[:, 0].sign()),
        "triplet": F.triplet_margin_loss(p, y, y.flip(0) + p.detach() * 2),
    }


def class_losses(self: Any, x: Tensor, labels: Tensor, pixels: Tensor) -> dict[str, Tensor]:
    p = self.fc(x)
    image = p[:, :, None] * self.w[None, None]
    return {
        "mean": F.cross_entropy(p, labels),
        "none": F.cross_entropy(p, labels, reduction="none"),
        "ignored": F.cross_entropy(p, labels, ignore_index=0, reduction="sum"),
        "smoothed": F.cross_entropy(p, labels, label_smoothing=0.1),
        "weighted": F.cross_entropy(p, labels, weight=self.by_class),
        "pixels": F.cross_entropy(image, pixels),
        "soft": F.cross_entropy(p, p.detach().exp().softmax(-1)),
        "nll": F.nll_loss(p.log_softmax(-1), labels),
    }


CASES: dict[str, Case] = {
    "losses": case(net(losses, fc=linear(6, 5), w=lambda: torch.rand(5) + 0.5), ROWS, "y=float32[B,5]"),
    "class_losses": case(
        net(class_losses, fc=linear(6, 5), w=param(4), by_class=lambda: torch.linspace(0.5, 1.5, 5)),
        ROWS,
        "labels=int64[B]:0..4",
        "pixels=int64[B,4]:0..4",
    ),
}
