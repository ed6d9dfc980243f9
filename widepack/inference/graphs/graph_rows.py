"""Finds the batches that graphs of an entry run, and how a smaller batch is padded to one.

A graph has one batch size. A call with fewer rows repeats its last row, and the answers to the repetitions
are left out. This is right only where no row changes the answer to another one, as the artifact says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...errors import InputError
from ...rows.axes import row_axis_of
from ..programs.entry_inputs import EntryInputs

LARGEST = 64
"""The largest batch of a graph. The start of kernels is a small part of larger calls."""
_ANY_SIZE = 0
"""The bucket of an entry whose inputs have no dim of the batch."""


@dataclass(frozen=True)
class RowDims:
    """Where the rows are.

    inputs: For each tensor of a call the dim of its rows; None for a tensor that all rows share. outputs: For
    each output the dim in a member's answer.
    """

    inputs: tuple[int | None, ...]
    outputs: tuple[int, ...]

    def answers(self, number: int, value: Any, kind: str, rows: int) -> Any:
        """Returns the first rows of an output. number: of the output. kind: its kind in the wide program."""
        dim = self.outputs[number]
        if isinstance(value, list):
            return [v.narrow(dim, 0, rows) for v in value]
        return value.narrow(dim + (kind != "shared"), 0, rows)

    def has_rows(self, number: int, value: Any, kind: str, rows: int) -> bool:
        """Returns whether an output has exactly these rows."""
        dim = self.outputs[number]
        parts = value if isinstance(value, list) else [value]
        dim += not isinstance(value, list) and kind != "shared"
        return all(isinstance(v, Tensor) and v.dim() > dim and v.shape[dim] == rows for v in parts)


def row_dims(inputs: EntryInputs, per_member: Sequence[bool]) -> tuple[RowDims | None, str]:
    """Returns where the rows are, or None and why batches cannot be padded.

    per_member: for each input whether a call has one value for each member.
    """
    entry, letter, rows = inputs.entry, inputs.letter, inputs.entry.rows
    if not letter:
        return None, "its inputs have no dim of the batch"
    if entry.state:
        return None, "it has states"
    if rows is None:
        return None, "the artifact does not say whether its rows are independent; build it again"
    if not rows.independent:
        return None, f"its rows are {rows}"
    if rows.dim != letter:
        return None, f"its rows are independent along {rows.dim}, and its batch is {letter}"
    try:
        axes = [row_axis_of(i.type, letter) for i in entry.inputs]
        dims = [row_axis_of(o.type, letter) for o in entry.outputs]
    except ValueError as e:
        return None, f"its rows are not in one dim: {e}"
    found = tuple(axis.dim for axis in dims if axis is not None)
    if len(found) != len(dims):
        return None, f"an output has no dim {letter}"
    places = tuple(
        None if axis is None else axis.dim + own for axis, own in zip(axes, per_member, strict=True)
    )
    return RowDims(places, found), ""


def buckets(inputs: EntryInputs, batch: tuple[int, int | None]) -> tuple[int, ...]:
    """Returns the batches of the graphs of one program, smallest first.

    They are the powers of two in its batch class, and the largest batch of the class, up to `LARGEST` and as
    far as the model takes them. So at most as many rows are added as a call has. batch: the batch class.
    """
    if not inputs.letter:
        return (_ANY_SIZE,)
    least, most = batch
    top = LARGEST if most is None else min(LARGEST, most)
    chosen = sorted({s for s in (*(1 << i for i in range(top.bit_length())), top) if least <= s <= top})
    return tuple(s for s in chosen if inputs.fits({**inputs.example, inputs.letter: s}))


@dataclass(frozen=True)
class Fit:
    """How a call fits the graphs of a program.

    bucket: The batch of the graph; None if no graph is for the call. rows: The rows of the call. why_not: Why
    no graph is; "" if one is.
    """

    bucket: int | None
    rows: int
    why_not: str = ""


class BucketChoice:
    """Chooses the bucket of calls of one pattern.

    inputs: of the entry. per_member: for each input whether a call has one value for each member. sizes: the
    buckets. padded: whether a smaller batch may be padded.
    """

    def __init__(
        self, inputs: EntryInputs, per_member: Sequence[bool], sizes: Sequence[int], padded: bool
    ) -> None:
        self._inputs, self._per_member = inputs, tuple(per_member)
        self._sizes, self._padded = tuple(sizes), padded

    def of(self, values: Sequence[Tensor]) -> Fit:
        """Returns how a call fits. values: its tensors."""
        letter = self._inputs.letter
        try:
            sizes = self._inputs.binder.check(values, self._per_member)
        except InputError:
            return Fit(None, 0, "its tensors are not those of the entry")
        for name, size in sizes.items():
            if name != letter and size != self._inputs.example[name]:
                example = self._inputs.example[name]
                return Fit(None, 0, f"{name} = {size}, and graphs are for {name} = {example}")
        if not letter:
            return Fit(_ANY_SIZE, _ANY_SIZE)
        rows = sizes.get(letter, 0)
        bucket = next((s for s in self._sizes if s >= rows), None) if rows else None
        if bucket is None:
            largest = max(self._sizes, default=0)
            return Fit(None, rows, f"{letter} = {rows}, and the largest graph is for {letter} = {largest}")
        if bucket != rows and not self._padded:
            return Fit(None, rows, f"{letter} = {rows} would be padded to {bucket}")
        return Fit(bucket, rows)
