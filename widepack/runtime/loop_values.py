"""Splits the arguments of a loop region by member, and joins the members' results, on a walk of a program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from widepack_artifacts.program import Kind

from ..errors import ArtifactError
from .meta_values import META


class _LazyMembers(Sequence[Any]):
    """The members of a stacked tensor, each made on access."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def __len__(self) -> int:
        return int(self.value.shape[0])

    def __getitem__(self, i: Any) -> Any:
        return self.value[i]


def members_of(value: Any) -> Sequence[Any] | None:
    """The members' parts of a loop's argument: a list as it is, a tensor along axis 0.

    None for a value without parts.
    """
    if isinstance(value, (list, tuple)):
        return list(value)
    if not isinstance(value, torch.Tensor) or not value.dim():
        return None
    return _LazyMembers(value)


def join_members(values: list[Any], kind: Kind, members: int, real: bool) -> Any:
    """One output of a loop from the members' results.

    real: whether these have data. Raises: ArtifactError.
    """
    if kind == "ragged":
        return values
    first = values[0]
    if not isinstance(first, torch.Tensor):
        raise ArtifactError(f"a loop has the result {describe(first)}, which cannot be stacked")
    if real:
        return torch.stack(values)
    return torch.empty((members, *first.shape), dtype=first.dtype, device=META)


def describe(value: Any) -> str:
    """A value in words: `float32[3, 4]`, `a list of 2`."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, (list, tuple)) else "")
