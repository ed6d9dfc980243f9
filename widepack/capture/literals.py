"""Checks that members agree in the tensors whose values their code reads.

The program was captured with the values of one member: a branch on them went one way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from ..checkpoints.differences import bit_equal
from ..checkpoints.literals import other_literal
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
    first = _values(captured, member(members[0])) if captured.literals else {}
    for i in members[1:] if captured.literals else ():
        other = _values(captured, member(i))
        for literal in captured.literals:
            a, b = first[literal.name], other.get(literal.name)
            if b is None or not bit_equal(a, b):
                raise other_literal(literal.name, literal.line, (names[members[0]], a), (names[i], b))


def _values(captured: Captured, module: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the tensors of a member whose values its code reads, by name."""
    known = {
        **dict(tensors_of(module)),
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    return {x.name: known[x.name].detach() for x in captured.literals if x.name in known}
