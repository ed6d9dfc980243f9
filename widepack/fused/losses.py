"""Computes each member's loss of the answers of a fused module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from ..errors import UsageError
from ..inference.input_values import Each
from .channel_packing import unpack


def member_losses(
    fn: Callable[..., torch.Tensor] | Sequence[Callable[..., torch.Tensor]],
    answers: Any,
    targets: tuple[Any, ...],
    members: int,
    *,
    packed: bool,
) -> torch.Tensor:
    """Returns each member's loss, `[N]`.

    Args:
        fn: Returns one number of a member's answer and its targets. A list has a function for each member.
        answers: Of all members.
        targets: Those inside `Each` have one value for each member.
        members: N.
        packed: Whether the answers are channel-packed.

    Raises:
        UsageError: The answers, the targets or the functions are not of N members, or a function returns
            more than one number.
    """
    functions = list(fn) if isinstance(fn, Sequence) else [fn] * members
    if len(functions) != members or not all(map(callable, functions)):
        raise UsageError(
            f"losses: fn is {len(functions)} functions or other values; give one function, or one for each "
            f"of the {members} members"
        )
    found = []
    for i in range(members):
        own = [_part(t.value, i, members, "a target") if isinstance(t, Each) else t for t in targets]
        loss = functions[i](_part(answers, i, members, "the answer", packed=packed), *own)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shape = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise UsageError(
                f"losses: the function returned {shape} for member {i}; a member's loss is one number, as "
                'with reduction="mean"'
            )
        found.append(loss.reshape(()))
    return torch.stack(found)


def _part(value: Any, i: int, members: int, title: str, *, packed: bool = False) -> Any:
    """Returns member i's part of a value. Raises: UsageError."""

    def part(leaf: Any) -> Any:
        if not isinstance(leaf, (torch.Tensor, list)):
            return leaf
        if packed and isinstance(leaf, torch.Tensor):
            return unpack(leaf, members)[i]
        if (isinstance(leaf, torch.Tensor) and not leaf.ndim) or len(leaf) != members:
            size = list(leaf.shape) if isinstance(leaf, torch.Tensor) else len(leaf)
            raise UsageError(f"losses: {title} is {size}; give one value for each of the {members} members")
        return leaf[i]

    return pytree.tree_map(part, value, is_leaf=lambda leaf: _is_ragged(leaf, members))


def _is_ragged(leaf: Any, members: int) -> bool:
    """Returns whether a list has one tensor for each member, whose shapes differ."""
    tensors = (
        isinstance(leaf, list) and len(leaf) == members and all(isinstance(v, torch.Tensor) for v in leaf)
    )
    return tensors and any(v.shape != leaf[0].shape for v in leaf)
