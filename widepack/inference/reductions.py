"""Reduces the answers of all members to one: what `mean` and `std` compute after the call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, UsageError
from .output import Output


def transformed(x: torch.Tensor, of: str | None) -> torch.Tensor:
    if of == "softmax":
        return x.softmax(-1)
    if of == "sigmoid":
        return x.sigmoid()
    if of is not None:
        raise UsageError(f"of={of!r} is unknown; known: softmax, sigmoid, None")
    return x


def checked_floating(x: torch.Tensor) -> torch.Tensor:
    """Returns the members' answers. Raises: InputError for whole numbers, which have no mean and no vote."""
    if not (x.is_floating_point() or x.is_complex()):
        raise InputError(
            f"the members' answers are {str(x.dtype).removeprefix('torch.')}: they have no mean, and no "
            "scores to vote with. Combine them in your own code, for example ens(x).mode(0).values"
        )
    return x


def weighted_mean(x: torch.Tensor, weights: Sequence[float] | None) -> torch.Tensor:
    if weights is None:
        return x.mean(0)
    try:
        w = torch.as_tensor(weights, dtype=x.dtype, device=x.device)
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(f"weights={weights!r:.60} is not a list of numbers") from None
    if w.dim() != 1 or w.shape[0] != x.shape[0]:
        raise UsageError(
            f"{w.numel()} weights for {x.shape[0]} members; give a list with one for each member"
        )
    averaged: torch.Tensor = torch.tensordot(w / w.sum(), x, 1)
    return averaged


def reduced_leaf(result: Any, ragged: bool, one_shape: bool) -> Tensor:
    """Returns the leaf of an answer that ensembles use: `logits`, else the first.

    ragged: whether the first output is a list of N tensors in the artifact. one_shape: whether the loaded
    members' tensors of a list have one shape. Raises: InputError for tensors of several shapes.
    """
    if isinstance(result, (Output, Mapping)):
        result = result["logits"] if "logits" in result else result[next(iter(result))]
    while isinstance(result, (tuple, list)) and result and not ragged:
        result = result[0]
    if isinstance(result, list) and one_shape and len({y.shape for y in result}) == 1:
        result = torch.stack(result)
    if not isinstance(result, Tensor):
        raise InputError(
            "the members' outputs differ in shape, or are not tensors: they have no mean. Combine the "
            "members' answers in your own code"
        )
    return result
