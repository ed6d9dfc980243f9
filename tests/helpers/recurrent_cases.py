"""Makes random tensors for the tests of recurrent ops."""

from __future__ import annotations

import torch
from torch import Tensor


def rand(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
