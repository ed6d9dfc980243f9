"""Checks that the members agree in the tensors whose values their code reads.

The program was captured with the values of one member: a branch on them went one way.
"""

from __future__ import annotations

import torch

from ..capture.capture import Captured
from ..capture.module_tensors import tensors_of
from ..checkpoints.differences import bit_equal
from ..errors import MemberMismatch
from .members import EntryMembers


def check_literals(captured: Captured, members: EntryMembers, signature: int) -> None:
    """Refuses members whose code reads other values than that of the captured one.

    Raises: MemberMismatch.
    """
    alike = [i for i, other in enumerate(members.aligned.signatures) if other == signature]
    first = _values(captured, members, alike[0]) if captured.literals else {}
    for i in alike[1:] if captured.literals else ():
        other = _values(captured, members, i)
        for literal in captured.literals:
            a, b = first[literal.name], other.get(literal.name)
            if b is None or not bit_equal(a, b):
                raise MemberMismatch(
                    f"the code of the members reads the value of {literal.name} at {literal.line}, so it belongs "
                    f"to the program and must be equal in all members. It is {text_of(a)} in "
                    f"{members.aligned.names[alike[0]]}, and {text_of(b)} in {members.aligned.names[i]}: build an "
                    f"artifact for each value, or compute with tensors there (torch.where for a branch)"
                )


def _values(captured: Captured, members: EntryMembers, i: int) -> dict[str, torch.Tensor]:
    """Returns the tensors of member i whose values its code reads, by name."""
    module = members.module(i)
    known = {
        **dict(tensors_of(module)),
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    return {x.name: known[x.name].detach() for x in captured.literals if x.name in known}


def text_of(value: torch.Tensor | None) -> str:
    """Returns a tensor's numbers as a short text."""
    if value is None:
        return "absent"
    return str(value.tolist())[:60] if value.numel() <= 8 else f"a tensor {list(value.shape)}"
