"""Checks that members agree in what their code reads from their own tensors.

The program was captured with the values of one member: a branch on them went one way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from ..checkpoints.differences import bit_equal
from ..checkpoints.literals import other_literal, value_read
from .capture import Captured
from .module_tensors import tensors_of


def check_literals(
    captured: Captured, member: Callable[[int], nn.Module], members: Sequence[int], names: Sequence[str]
) -> None:
    """Refuses members whose code reads other values than that of the captured one.

    member: Returns a member by its number. members: Those of this capture; the captured one is the first.
    names: Of all members.
    Raises: MemberMismatch.
    """
    first = _values(captured, member(members[0])) if captured.literals else []
    for i in members[1:] if captured.literals else ():
        for literal, a, b in zip(captured.literals, first, _values(captured, member(i))):
            if a is None or b is None or not bit_equal(a, b):
                raise other_literal(literal, (names[members[0]], a), (names[i], b))


def _values(captured: Captured, module: nn.Module) -> list[torch.Tensor | None]:
    """Returns what a member's code reads, for each literal; None where the member lacks a tensor for it."""
    known = {
        **dict(tensors_of(module)),
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    return [
        value_read(x.expression, known.__getitem__) if known.keys() >= {*x.weights} else None
        for x in captured.literals
    ]
