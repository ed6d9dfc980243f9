"""Reads from the type of an input or an output in which dim its rows are."""

from __future__ import annotations

from typing import Any

from ..ir.tensor_type import TensorType, tensor_type
from ..spec.input_spec import DimExpr
from .layout import RowAxis


def row_axis(type_: TensorType, letter: str) -> RowAxis | None:
    """Returns where the rows are in an input or an output, by its type; None if it has no dim of the batch.

    Raises: ValueError for several dims of the batch, and for a multiple of it.
    """
    found = [d for d, size in enumerate(type_.sizes) if letter in _letters(size)]
    if not found:
        return None
    if len(found) > 1 or type_.sizes[found[0]] != DimExpr(letter, 1):
        raise ValueError(f"{type_} has no single dim {letter}")
    return RowAxis(found[0])


def row_axis_of(type_: str, letter: str) -> RowAxis | None:
    """As `row_axis`, by the text of a type. Raises: ValueError, also for a value that is no tensor."""
    parsed = tensor_type(type_)
    if parsed is None:
        raise ValueError(f"{type_ or 'a value'} is no tensor")
    return row_axis(parsed, letter)


def _letters(size: Any) -> set[str]:
    if isinstance(size, DimExpr):
        return {size.letter}
    words = "".join(c if c.isalnum() or c == "_" else " " for c in str(size)).split()
    return set(words)
