"""Shares shapes and random numbers between the tests of prepacked layers."""

from __future__ import annotations

import torch
from torch import Tensor

OWN = torch.ops.widepack


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(
        dtype
    )
