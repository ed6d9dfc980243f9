"""Runs an entry over the rows of a file, block by block and batch by batch, and finds the row of an error."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, UsageError
from ..inference.entry import WideEntry
from ..inference.feature_record import read_features
from ..inference.model import WideModel
from ..inference.reduced_answer import Reduction
from ..ir.random_ops import uses_random_ops
from ..ir.tensor_type import parse_slot
from ..spec.dtypes import dtype_of
from ..spec.input_spec import DimExpr
from .column_choice import MemberColumn, checked_ids, chosen_columns, passed_columns
from .endings import ARROW
from .input_columns import InputColumns, RowInput
from .outputs import Collected, NamedOutput, OutputColumns, row_dim_of
from .table import RowBlock, Table, place

BATCH = 256
"""The rows of a batch by default."""
_MOST_FILLED = 256
"""How many rows are added at most to a batch that the model takes at other sizes only."""
_BLOCK_ROWS, _BLOCK_BYTES = 2**12, 2**24
"""A block has as many batches as fit into both: rows, and bytes of inputs and outputs."""


class Prediction:
    """One run: what is read and computed.

    Args:
        ens: The model.
        entry: Its entry that runs.
        title: What messages call it.
        table: The input file.
        suffix: The format of the output.
        statistics: The statistics that replace the members' outputs; None for the outputs.
        calibrated: Whether the statistics are calibrated.
        batch: The rows of a batch; None for the default.
        allowed: Whether the rows may be dependent.
        member: The column that names the member of each row; None for all members.
        answer: The output that is wanted; None for all.
        name: What it is called; None for its own name.
        nan: Whether a null in an input is NaN; else it is refused.

    Attributes:
        letter: The dim of the rows.
        batch: The rows of a batch.
        columns: The columns that each input is read from.
        passed: The columns that pass through.

    Raises:
        UsageError: The entry has no rows, the options exclude each other, or no calibration is recorded.
    """

    def __init__(
        self,
        ens: WideModel,
        entry: WideEntry,
        title: str,
        table: Table,
        suffix: str,
        *,
        statistics: Reduction | None = None,
        calibrated: bool = False,
        batch: int | None = None,
        allowed: bool = False,
        member: str | None = None,
        answer: str | int | None = None,
        name: str | None = None,
        nan: bool = False,
    ) -> None:
        self._nan, self._features = nan, read_features(ens.manifest)
        self._entry, self._table, self._suffix, self._device = entry, table, suffix, ens.device
        self._member = None if member is None else MemberColumn(table, member, entry.members)
        self.letter, self._independent = _checked_rows(entry, title, member, allowed, batch)
        self._inputs = _row_inputs(entry, title, self.letter)
        self._outputs = OutputColumns(entry, self.letter, answer, name, statistics)
        if calibrated:
            self._outputs.calibrate()
        dim = entry.entry.dims[self.letter]
        self._has_conditions = bool(entry.entry.guards) or dim.min > 1
        self.batch = batch or min(BATCH, dim.max or BATCH)
        self.columns: list[InputColumns] = []
        self.passed: list[str] = []

    def choose(
        self,
        named: Mapping[str, Any],
        ids: Sequence[str] | None,
        note: Callable[[str], None],
        unread: Collection[str] = (),
    ) -> None:
        """Chooses the columns. note: is called with each choice that the user did not make. unread: columns
        that are no inputs unless they are named for one. Raises: UsageError.
        """
        others = {*(checked_ids(self._table, ids) or ()), *self._member_names(), *unread}
        self.columns, notes = chosen_columns(
            self._table, self._inputs, named, others, self._nan, self._features
        )
        self.passed, more = passed_columns(self._table, ids, self._read_names(), self._suffix)
        for sentence in (*notes, *more):
            note(sentence)

    def _member_names(self) -> list[str]:
        return [self._member.name] if self._member else []

    def _read_names(self) -> list[str]:
        return list(dict.fromkeys(n for c in self.columns for n in c.names))

    def blocks(self) -> Iterator[tuple[RowBlock, dict[str, Tensor], int]]:
        """Runs all rows. Yields: a block of the file, its outputs as columns, and its number of batches.

        Raises: InputError, with the number of a row that the model refuses.
        """
        dtypes = {n: c.input.dtype for c in self.columns for n in c.names}
        names = list(dict.fromkeys([*self._read_names(), *self._member_names(), *self.passed]))
        bytes_in = sum((c.input.numbers or 64) * c.input.dtype.itemsize for c in self.columns)
        fitting = _BLOCK_BYTES // (self.batch * (bytes_in + self._outputs.row_bytes()))
        rows = self.batch * max(1, min(_BLOCK_ROWS // self.batch, fitting))
        shapes: dict[str, list[int]] = {}
        for block in self._table.blocks(names, dtypes, rows):
            if not block.rows:
                yield block, self._without_rows(), 0
                continue
            values = [c.read(block) for c in self.columns]
            members = self._member.numbers(block) if self._member else None
            yield block, *self._run(values, members, block.start, shapes)

    def _run(
        self,
        values: Sequence[Tensor],
        members: Sequence[int] | None,
        start: int,
        shapes: dict[str, list[int]],
    ) -> tuple[dict[str, Tensor], int]:
        """Runs the rows of a block in batches. Returns: the outputs as columns, and the number of batches.

        Args:
            values: The inputs, `[rows, ...]`.
            members: The member of each row; None for all members.
            start: The number of the first row in the file.
            shapes: The shape of each output in the blocks before.
        """
        count = values[0].shape[0]
        collected = Collected(count, self._entry.members, self._suffix in ARROW, shapes)
        firsts = range(0, count, self.batch)
        for first in firsts:
            last = min(first + self.batch, count)
            try:
                outputs = self._call(values, members, first, last)
            except InputError as e:
                raise self._located(e, values, members, first, last, start) from e
            collected.add(first, last - first, outputs, place(self._table.path, start + first))
        return collected.columns(), len(firsts)

    def _without_rows(self) -> dict[str, Tensor]:
        """Returns the columns of a file without rows. One row of zeros shows what the outputs are."""
        try:
            columns, _ = self._run(self._zeros(), [0] if self._member else None, 0, {})
        except InputError:
            raise InputError(
                f"{self._table.path}: the file has no rows, and the columns of the output are not known "
                "without one"
            ) from None
        return {name: value[:0] for name, value in columns.items()}

    def _call(
        self, values: Sequence[Tensor], members: Sequence[int] | None, first: int, last: int
    ) -> list[NamedOutput]:
        """Runs the rows from `first` to before `last`. Rows may follow in the outputs that do not count."""
        rows = [v[first:last] for v in values]
        if self._has_conditions and members is None and self._independent:
            rows = self._filled(rows)
        leaves = [
            r.movedim(0, i.row_dim).contiguous().to(self._device) if i.row_dim else r.to(self._device)
            for r, i in zip(rows, self._inputs)
        ]
        return list(self._outputs.run(leaves, None if members is None else members[first:last]))

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
            if fits({**others, self.letter: count + more}):
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
            for half in ((low, middle), (middle, high)):
                if (refused := self._refused(values, members, *half)) is not None:
                    error, (low, high) = refused, half
                    break
            else:
                break
        one = high - low == 1
        where = f"row {start + low}" if one else f"rows {start + low} to {start + high - 1}"
        return InputError(f"{self._table.path}: {where} (the first row is 0): {error}")

    def _refused(
        self, values: Sequence[Tensor], members: Sequence[int] | None, first: int, last: int
    ) -> InputError | None:
        try:
            self._call(values, members, first, last)
        except InputError as e:
            return e
        return None

    def _zeros(self) -> list[Tensor]:
        """Returns one row of each input, `[1, ...]`: zeros, or the smallest integers that the model takes."""
        rows, entry = [], self._entry.entry
        for one, leaf in zip(self._inputs, entry.inputs):
            sizes = [d if isinstance(d, int) else d.factor * entry.dims[d.letter].example for d in one.dims]
            rows.append(torch.full((1, *sizes), leaf.low or 0, dtype=one.dtype))
        return rows


def _checked_rows(
    entry: WideEntry, title: str, member: str | None, allowed: bool, batch: int | None
) -> tuple[str, bool]:
    """Returns the dim of the rows, if a file may be split into batches, and whether rows are independent.

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
    if not rows.independent and member is not None:
        raise UsageError(
            f"{title} cannot be routed: its rows are not known to be independent.\n{rows.reason[:400]}\n"
            "Leave out member=, so that all members answer every row."
        )
    if not rows.independent and (not allowed or batch is None):
        raise UsageError(
            f"{title}: its rows are not known to be independent, so that the split into batches may change "
            f"the answers.\n{rows.reason[:400]}\n"
            "If the rows belong together in batches of B: allow_dependent_rows=True and batch=B "
            "(--allow-dependent-rows --batch B)."
        )
    return letter, rows.independent


def _row_inputs(entry: WideEntry, title: str, letter: str) -> list[RowInput]:
    """Returns what a row of each input is. Raises: UsageError for an input without rows."""
    inputs = []
    for one in entry.entry.inputs:
        dim = row_dim_of(one.type, letter)
        if dim is None:
            raise UsageError(
                f"{title}: the input {one.name} is {one.type}, which has no row for each row of a file along "
                f"{letter}; call the model in your own code"
            )
        slot = parse_slot(one.type)
        dims = tuple(slot.dims)
        inputs.append(RowInput(one.name, one.type, dtype_of(slot.dtype), dims[:dim] + dims[dim + 1 :], dim))
    return inputs
