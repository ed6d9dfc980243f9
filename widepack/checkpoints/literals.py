"""Checks what the code of a model reads from its weights: it must be the same in all members."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from widepack_artifacts.literals import CASTS, Expression, Literal
from widepack_artifacts.manifest import Manifest
from widepack_artifacts.weights import Weights

from ..errors import ArtifactError, MemberMismatch
from .differences import bit_equal
from .new_member import NewMember


def check_literals(manifest: Manifest, files: Weights, new: NewMember, path: str | Path) -> None:
    """Refuses a new member whose code would read other values than the programs of an artifact have.

    files: the weights of the artifact. path: of the new member.
    Raises: MemberMismatch; ArtifactError for a literal that cannot be computed.
    """
    kinds = {w.name: w.kind for w in manifest.member_weights}
    for literal in (x for entry in manifest.entries.values() for x in entry.literals):
        try:
            value = value_read(literal.expression, new.value)
            stored = value_read(literal.expression, lambda name: files.of_member(name, kinds[name], new.like))
        except (RuntimeError, TypeError, IndexError) as e:
            raise ArtifactError(f"manifest: the literal {literal.text[:200]} cannot be computed: {e}") from e
        if not bit_equal(value, stored):
            raise other_literal(literal, ("the artifact", stored), (str(path), value))


def value_read(expression: Expression, weight_of: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """Returns what an expression over weights gives. weight_of: Returns a weight by its name.

    The tensors of an op have one shape, or one number each: a result is never larger than the weights.
    Raises: RuntimeError for weights that an op does not take.
    """

    def value(part: Expression) -> Any:
        if isinstance(part, str):
            return weight_of(part).detach()
        if not isinstance(part, tuple):
            return part
        op, *arguments = part[0], *map(value, part[1:])
        tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
        if not tensors or len({a.shape for a in tensors if a.numel() != 1}) > 1:
            raise RuntimeError(f"{op} of {[list(a.shape) for a in tensors]}")
        if op in CASTS:
            return tensors[0].to(getattr(torch, op))
        return getattr(torch, op)(*arguments)

    result: torch.Tensor = value(expression)
    return result


def other_literal(
    literal: Literal, one: tuple[str, torch.Tensor | None], other: tuple[str, torch.Tensor | None]
) -> MemberMismatch:
    """Returns the error for two members of which one reads another value. one, other: who, and its value."""
    what = f"the value of {literal.text}" if isinstance(literal.expression, str) else literal.text
    return MemberMismatch(
        f"the code of the members reads {what}{f' at {literal.line}' if literal.line else ''}, so it belongs"
        f" to the program and must be equal in all members. It is {_text(one[1])} in {one[0]}, and"
        f" {_text(other[1])} in {other[0]}: build an artifact for each value, or compute with tensors there"
        " (torch.where for a branch)"
    )


def _text(value: torch.Tensor | None) -> str:
    """Returns a tensor's numbers as a short text."""
    if value is None:
        return "absent"
    return (
        str(value.tolist())[:60] if value.numel() <= 8 else f"a tensor {list(value.shape)} of other numbers"
    )
