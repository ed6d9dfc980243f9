"""oneDNN: the library that torch's packed layers run on, where it is there."""

from __future__ import annotations

import torch
from torch import Tensor


def usable(weight: Tensor) -> bool:
    """Whether oneDNN takes this weight in an order of its own."""
    there: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return there and weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() > 0
