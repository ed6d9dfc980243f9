"""Forms of memory that a tensor of a checkpoint may have."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded": lambda t: (
        t.reshape(-1)[:1].expand(t.numel()).view(t.shape) if t.ndim == 1 else t[:1].expand_as(t)
    ),
    "every second": lambda t: torch.stack([t, t], -1)[..., 0],
    "transposed": lambda t: t.t().contiguous().t() if t.ndim == 2 else t,
    "negated": lambda t: torch.complex(t, t).conj().imag,
    "part of a storage": lambda t: torch.cat([t.reshape(-1), t.reshape(-1)])[t.numel() :].view(t.shape),
}
