"""Reduces the answers of all members to one: what `mean` and `std` compute after the call."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import UsageError


def transformed(x: torch.Tensor, of: str | None) -> torch.Tensor:
    if of == "softmax":
        return x.softmax(-1)
    if of == "sigmoid":
        return x.sigmoid()
    if of is not None:
        raise UsageError(f"of={of!r} is unknown; known: softmax, sigmoid, None")
    return x


def weighted_mean(x: torch.Tensor, weights: Sequence[float] | None) -> torch.Tensor:
    if weights is None:
        return x.mean(0)
    if len(weights) != x.shape[0]:
        raise UsageError(f"{len(weights)} weights for {x.shape[0]} members; give one for each member")
    w = torch.tensor(weights, dtype=x.dtype, device=x.device)
    averaged: torch.Tensor = torch.tensordot(w / w.sum(), x, 1)
    return averaged
