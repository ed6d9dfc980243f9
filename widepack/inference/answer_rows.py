"""Compares the sizes of answers with what an entry says of them: a file of another maker may lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from widepack_artifacts.entry import OutputLeaf

from ..errors import ArtifactError
from ..ir.tensor_type import sizes_of
from ..spec.input_spec import DimExpr


def check_rows(title: str, leaves: Sequence[Any], dims: Sequence[int], rows: int) -> None:
    """Checks that each leaf of an answer has as many rows as the call.

    title: the entry in messages. dims: in which dim of each leaf the rows are. rows: of the call. Raises:
    ArtifactError.
    """
    for number, (leaf, dim) in enumerate(zip(leaves, dims)):
        shape = getattr(leaf, "shape", ())
        if len(shape) <= dim or shape[dim] != rows:
            raise ArtifactError(
                f"{title}: output {number} of a program is {list(shape)} for {rows} rows; "
                f"the entry says that its rows are in dim {dim}"
            )


class AnswerSizes:
    """The sizes of an entry's outputs that are dims of its inputs."""

    def __init__(self, outputs: Sequence[OutputLeaf]) -> None:
        self._named = [
            (number, dim, size)
            for number, output in enumerate(outputs)
            for dim, size in enumerate(sizes_of(output.type))
            if isinstance(size, DimExpr)
        ]

    def check(self, title: str, leaves: Sequence[Any], sizes: Mapping[str, int]) -> None:
        """Checks the leaves of a member's answer. sizes: of the dims in the call. Raises: ArtifactError."""
        for number, dim, size in self._named:
            if size.letter in sizes:
                shape = getattr(leaves[number], "shape", ())
                expected = sizes[size.letter] * size.factor
                if len(shape) <= dim or shape[dim] != expected:
                    raise ArtifactError(
                        f"{title}: output {number} of its program is {list(shape)}; the entry says that dim "
                        f"{dim} is {size}, which is {expected} in this call"
                    )
