"""Marks inputs of a call that have one value for each member."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .arrays import is_array


class Each:
    """An input that has one value for each member, `[N, ...]`. `widepack.each` makes it."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"widepack.each({self.value!r})"


def each(value: Any) -> Each:
    """Marks an input of a call as one value for each member.

    Args:
        value: A tensor `[N, ...]`, or a list of N tensors of one shape. N is the number of loaded members.

    Returns:
        The marked input, to be passed in place of the tensor. Inputs without a mark are the same for all
        members.

    Example:
        >>> y = ens(x, h=widepack.each(h))  # member i gets x and h[i]
    """
    return Each(value)


def each_if_tensor(value: Any) -> Any:
    """Marks an input that has tensors as one value for each member."""
    return Each(value) if holds_tensor(value) else value


def holds_tensor(value: Any) -> bool:
    """Returns whether an input is a tensor, or a container with a tensor in it."""
    if isinstance(value, Mapping):
        return any(map(holds_tensor, value.values()))
    return (
        isinstance(value, torch.Tensor)
        or is_array(value)
        or (isinstance(value, (list, tuple)) and any(map(holds_tensor, value)))
    )
