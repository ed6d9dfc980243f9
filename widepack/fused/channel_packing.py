"""The channel-packed form: N values `[B, C, *]` side by side in the channels of one, `[B, N*C, *]`, member after member."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import InputError


def pack(values: Sequence[torch.Tensor] | torch.Tensor) -> torch.Tensor:
    """N tensors of one shape `[B, C, *]`, or one `[N, B, C, *]`, as `[B, N*C, *]`; `[B]` of each as `[B, N]`. Raises: InputError."""
    if not isinstance(values, torch.Tensor):
        found = list(values)
        if not found or not all(isinstance(v, torch.Tensor) and v.shape == found[0].shape for v in found):
            raise InputError(
                f"pack takes N tensors of one shape; got {', '.join(str(list(v.shape)) for v in found if isinstance(v, torch.Tensor)) or 'none'}"
            )
        values = torch.stack(found)
    if values.ndim < 2:
        return values
    side = values.movedim(0, 1)  # [B, N, C, *]
    return side.flatten(1, 2) if side.ndim > 2 else side


def unpack(y: torch.Tensor, n: int) -> list[torch.Tensor]:
    """`[B, N*C, *]` as N views `[B, C, *]`. Raises: InputError where the channels are no multiple of N."""
    if y.ndim < 2 or n < 1 or y.shape[1] % n:
        raise InputError(f"unpack takes [B, N*C, ...] with a multiple of {n} channels at axis 1; got {list(y.shape)}")
    return list(y.chunk(n, 1))
