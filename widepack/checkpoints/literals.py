"""Checks the tensors whose values the code of a model reads: they must be equal in all members."""

from __future__ import annotations

from pathlib import Path

import torch

from widepack_artifacts.manifest import Manifest
from widepack_artifacts.weights import Weights

from ..errors import MemberMismatch
from .differences import bit_equal
from .newcomer import Newcomer


def check_literals(manifest: Manifest, files: Weights, new: Newcomer, path: str | Path) -> None:
    """Refuses a new member whose code would read other values than the programs of an artifact have.

    files: the weights of the artifact. path: of the new member. Raises: MemberMismatch.
    """
    kinds = {w.name: w.kind for w in manifest.member_weights}
    for entry in manifest.entries.values():
        for weight, line in entry.literals:
            value, stored = new.value(weight), files.of_member(weight, kinds[weight], 0)
            if not bit_equal(value, stored):
                raise other_literal(weight, line, ("the artifact", stored), (str(path), value))


def other_literal(
    name: str, line: str, one: tuple[str, torch.Tensor | None], other: tuple[str, torch.Tensor | None]
) -> MemberMismatch:
    """Returns the error for two members of which one reads another value. one, other: who, and its value."""
    return MemberMismatch(
        f"the code of the members reads the value of {name}{f' at {line}' if line else ''}, so it "
        "belongs to the "
        f"program and must be equal in all members. It is {_text(one[1])} in {one[0]}, and "
        f"{_text(other[1])} in "
        f"{other[0]}: build an artifact for each value, or compute with tensors there (torch.where "
        "for a branch)"
    )


def _text(value: torch.Tensor | None) -> str:
    """Returns a tensor's numbers as a short text."""
    if value is None:
        return "absent"
    return (
        str(value.tolist())[:60] if value.numel() <= 8 else f"a tensor {list(value.shape)} of other numbers"
    )
