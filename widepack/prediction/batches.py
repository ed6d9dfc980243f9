"""Runs the rows of a block in batches, and finds the row of an error."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from widepack_artifacts import tree

from ..errors import InputError
from ..inference.entry import WideEntry
from ..inference.output import named_values
from ..spec.input_spec import DimExpr
from .answers import AnswerColumns, Collected, NamedAnswer
from .entry_rows import row_of_zeros
from .input_columns import RowInput

_MOST_FILLED = 256
"""How many rows are added at most to a batch that the model takes at other sizes only."""


class Batches:
    """The batches of an entry.

    Args:
        entry: The entry.
        columns: What is computed.
        inputs: The inputs, in the order of the entry.
        letter: The dim of the rows.
        rows: The rows of a batch.
        device: Where the model runs.
        path: The input file, for messages.
        independent: Whether the rows are independent, so that a batch can be filled up and split.
    """

    def __init__(
        self,
        entry: WideEntry,
        columns: AnswerColumns,
        inputs: Sequence[RowInput],
        letter: str,
        rows: int,
        device: torch.device,
        path: Path,
        independent: bool,
    ) -> None:
        self._entry, self._columns, self._inputs = entry, columns, inputs
        self._letter, self._rows, self._device, self._path = letter, rows, device, path
        self._independent = independent
        self._has_conditions = bool(entry.entry.guards) or entry.entry.dims[letter].min > 1

    def run(
        self, values: Sequence[Tensor], members: Sequence[int] | None, start: int, collected: Collected
    ) -> int:
        """Runs all rows of a block, and returns the number of batches.

        Args:
            values: The inputs, `[rows, ...]`.
            members: The member of each row; None for all members.
            start: The number of the first row in the file.
            collected: Takes the answers.

        Raises:
            InputError: The model refuses a row. The message has its number in the file.
        """
        count = values[0].shape[0]
        firsts = range(0, count, self._rows)
        for first in firsts:
            last = min(first + self._rows, count)
            try:
                answers = self.call(values, members, first, last)
            except InputError as e:
                raise self._located(e, values, members, first, last, start) from e
            collected.add(first, last - first, answers, f"{self._path}: row {start + first}")
        return len(firsts)

    def call(
        self, values: Sequence[Tensor], members: Sequence[int] | None, first: int, last: int
    ) -> list[NamedAnswer]:
        """Runs the rows from `first` to before `last`. Rows may follow in the answer that do not count."""
        rows = [v[first:last] for v in values]
        if self._has_conditions and members is None and self._independent:
            rows = self._filled(rows)
        leaves = [
            r.movedim(0, i.row_dim).contiguous().to(self._device) if i.row_dim else r.to(self._device)
            for r, i in zip(rows, self._inputs)
        ]
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for name, kind, shape, _ in self._entry.entry.signature:
            value = tree.build(shape, leaves, named_values)
            if kind == "positional":
                args.append(value)
            else:
                kwargs[name] = value
        return self._columns.run(args, kwargs, None if members is None else members[first:last])

    def _filled(self, rows: list[Tensor]) -> list[Tensor]:
        """Returns the rows, and behind them copies of the last one until the model takes their number."""
        count = rows[0].shape[0]
        others = {
            d.letter: size // d.factor
            for r, i in zip(rows, self._inputs)
            for size, d in zip(r.shape[1:], i.dims)
            if isinstance(d, DimExpr)
        }
        fits = self._entry.programs.inputs.fits
        for more in range(_MOST_FILLED):
            if fits({**others, self._letter: count + more}):
                return [torch.cat([r, r[-1:].expand(more, *r.shape[1:])]) for r in rows] if more else rows
        return rows  # the error of the call says which sizes the model takes

    def _located(
        self,
        error: InputError,
        values: Sequence[Tensor],
        members: Sequence[int] | None,
        first: int,
        last: int,
        start: int,
    ) -> InputError:
        """Returns an error with the row that causes it, by halves; with all rows if no single row does, and
        with none if a row of zeros causes it too.
        """
        zeros = self._refused(self._zeros(), None if members is None else [0], 0, 1)
        if zeros is not None and str(zeros) == str(error):
            return error
        low, high = first, last
        while self._independent and high - low > 1:
            middle = (low + high) // 2
            if (found := self._refused(values, members, low, middle)) is not None:
                error, high = found, middle
            elif (found := self._refused(values, members, middle, high)) is not None:
                error, low = found, middle
            else:
                break
        one = high - low == 1
        where = f"row {start + low}" if one else f"rows {start + low} to {start + high - 1}"
        return InputError(f"{self._path}: {where} (the first row is 0): {error}")

    def _zeros(self) -> list[Tensor]:
        return row_of_zeros(self._entry, self._inputs)

    def _refused(
        self, values: Sequence[Tensor], members: Sequence[int] | None, first: int, last: int
    ) -> InputError | None:
        try:
            self.call(values, members, first, last)
        except InputError as e:
            return e
        return None
