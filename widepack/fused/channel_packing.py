"""Converts between N values `[B, C, *]` and the channel-packed form, one value `[B, N*C, *]`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import InputError
from ..spec.input_spec import DimExpr


def pack(values: Sequence[torch.Tensor] | torch.Tensor) -> torch.Tensor:
    """Packs the members' values into one channel-packed tensor.

    Args:
        values: N tensors of one shape `[B, C, *]`, or one tensor `[N, B, C, *]`.

    Returns:
        A tensor `[B, N*C, *]`, with the channels of member 0 first. N tensors `[B]` become `[B, N]`.

    Raises:
        InputError: There are no tensors, or their shapes differ.

    Example:
        >>> x = widepack.pack([torch.randn(16, 3, 32, 32) for _ in range(4)])
        >>> x.shape
        torch.Size([16, 12, 32, 32])
    """
    if not isinstance(values, torch.Tensor):
        tensors = list(values)
        if not tensors or not all(
            isinstance(v, torch.Tensor) and v.shape == tensors[0].shape for v in tensors
        ):
            shapes = ", ".join(str(list(v.shape)) for v in tensors if isinstance(v, torch.Tensor))
            raise InputError(f"pack takes N tensors of one shape; got {shapes or 'none'}")
        values = torch.stack(tensors)
    if values.ndim < 2:
        return values
    batch_first = values.movedim(0, 1)  # [B, N, C, *]
    return batch_first.flatten(1, 2) if batch_first.ndim > 2 else batch_first


def unpack(y: torch.Tensor, n: int) -> list[torch.Tensor]:
    """Splits a channel-packed tensor into the members' values.

    Args:
        y: A tensor `[B, N*C, *]`.
        n: The number of members, N.

    Returns:
        N views `[B, C, *]` of `y`.

    Raises:
        InputError: The number of channels is not a multiple of N.

    Example:
        >>> first, *others = widepack.unpack(y, 4)
    """
    if y.ndim < 2 or n < 1 or y.shape[1] % n:
        raise InputError(
            f"unpack takes [B, N*C, ...] with a multiple of {n} channels at axis 1; got {list(y.shape)}"
        )
    return list(y.chunk(n, 1))


def split_channels(
    label: str, value: torch.Tensor, dims: Sequence[int | DimExpr], stacked: bool, members: int
) -> tuple[torch.Tensor, bool]:
    """Returns an input of a packed call as a view `[N, B, C, *]` and True; a shared input is unchanged.

    Args:
        label: The input's name in messages.
        value: The input, `[B, N*C, *]` or `[B, C, *]`.
        dims: The dims of the member's own input.
        stacked: Whether the input has a member axis already.
        members: The number of members, N.

    Raises:
        InputError: The number of channels is neither C nor N*C.
    """
    if stacked or len(dims) < 2 or value.ndim != len(dims):
        return value, stacked
    channels = dims[1]
    if value.shape[1] == channels and members > 1:
        return value, False
    if value.shape[1] % members or (isinstance(channels, int) and value.shape[1] != members * channels):
        raise InputError(
            f"{label} has {value.shape[1]} channels at axis 1, {list(value.shape)}. A packed call takes "
            f"{members} members' {channels} side by side, {members}*{channels}, or {channels} for all of them"
        )
    return value.reshape(value.shape[0], members, -1, *value.shape[2:]).movedim(1, 0), True
