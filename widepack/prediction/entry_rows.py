"""Finds out what a row of an entry's inputs is, and whether a file may be split into batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from widepack_artifacts.rows import Rows

from ..errors import UsageError
from ..inference.entry import WideEntry
from ..ir.random_ops import uses_random_ops
from ..ir.tensor_type import parse_slot
from ..rows.axes import row_axis_of
from ..spec.dtypes import dtype_of
from .input_columns import RowInput


def checked_rows(entry: WideEntry, title: str, member: str | None, allowed: bool, batch: int | None) -> Rows:
    """Returns along which dim the rows are, if a file may be split into batches.

    Args:
        entry: The entry.
        title: What messages call it.
        member: The column with the members.
        allowed: Whether the user allows rows that are not independent.
        batch: The batch that the user names.

    Raises:
        UsageError: The entry has states, or its rows are not independent and the user did not allow it.
    """
    if entry.entry.state:
        raise UsageError(
            f"{title} has states, and the rows of a file have no order in time; call the model in your own "
            "code"
        )
    if member is not None and uses_random_ops(entry.programs.source.member(0)[0]):
        raise UsageError(f"{title} draws random numbers, and member= needs rows that are independent")
    rows = entry.tensor_calls.rows
    letter = rows.dim or entry.programs.inputs.letter
    if not letter:
        raise UsageError(
            f"{title} takes batches of one fixed size; build it with a dynamic batch, for example "
            "x=float32[B,64]"
        )
    if rows.independent:
        return rows
    if member is not None:
        raise UsageError(
            f"{title} cannot be routed: its rows are not known to be independent.\n{rows.reason[:400]}\n"
            "Leave out member=, so that all members answer every row."
        )
    if not allowed or batch is None:
        raise UsageError(
            f"{title}: its rows are not known to be independent, so that the split into batches may change "
            f"the answers.\n{rows.reason[:400]}\n"
            "If the rows belong together in batches of B: allow_dependent_rows=True and batch=B "
            "(--allow-dependent-rows --batch B)."
        )
    return Rows(letter, rows.independent, rows.proved, rows.reason)


def row_inputs(entry: WideEntry, title: str, letter: str) -> list[RowInput]:
    """Returns what a row of each input is. Raises: UsageError for an input without rows."""
    found = []
    for one in entry.entry.inputs:
        slot = parse_slot(one.type)
        try:
            axis = row_axis_of(one.type, letter)
        except ValueError:
            axis = None
        if axis is None or not axis.plain:
            raise UsageError(
                f"{title}: the input {one.name} is {one.type}, which has no row for each row of a file along "
                f"{letter}; call the model in your own code"
            )
        dims = tuple(slot.dims)
        rest = dims[: axis.dim] + dims[axis.dim + 1 :]
        found.append(RowInput(one.name, one.type, dtype_of(slot.dtype), rest, axis.dim))
    return found


def row_of_zeros(entry: WideEntry, inputs: Sequence[RowInput]) -> list[torch.Tensor]:
    """Returns one row of each input, `[1, ...]`: zeros, or the smallest integers that the model takes."""
    found = []
    for one, leaf in zip(inputs, entry.entry.inputs):
        sizes = [d if isinstance(d, int) else d.factor * entry.entry.dims[d.letter].example for d in one.dims]
        found.append(torch.full((1, *sizes), leaf.low or 0, dtype=one.dtype))
    return found
