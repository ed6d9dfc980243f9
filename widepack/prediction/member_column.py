"""Reads which member each row is for, from a column with names or numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import InputError, UsageError
from ..spec.dtypes import dtype_of
from ..spec.names import number_in, number_of
from .conversion import kind_of
from .input_columns import rows_of
from .table import TEXT, RowBlock, Table, place


class MemberColumn:
    """The column that names the member of each row.

    Args:
        table: The input file.
        name: The column.
        members: The members' names.

    Raises:
        UsageError: There is no such column, or it holds neither texts nor integers.
    """

    def __init__(self, table: Table, name: str, members: Sequence[str]) -> None:
        type_ = rows_of(table, name)
        whole = type_.dtype not in ("", TEXT) and kind_of(dtype_of(type_.dtype)) == "integer"
        # a column of CSV is read as text, whatever its first rows look like
        if type_.shape != () or not (whole or type_.dtype == TEXT or not table.typed):
            raise UsageError(
                f"{table.path}: the column {name} is {type_.text}; a member is named by its name or its "
                "number"
            )
        self.name, self._members, self._path = name, members, table.path
        self._known: dict[Any, int] = {}

    def numbers(self, block: RowBlock) -> list[int]:
        """Returns the number of the member of each row. Raises: InputError for a value that is no member."""
        values, at = block.values(self.name)
        found = []
        for k, value in enumerate(values):
            if value not in self._known:
                self._known[value] = self._number(
                    value, lambda k=k: int((at == k).nonzero()[0]) + block.start
                )
            found.append(self._known[value])
        if not found:
            return []
        numbers: list[int] = torch.tensor(found)[at].tolist()
        return numbers

    def _number(self, value: Any, row: Any) -> int:
        try:
            # a text may be a number, since CSV files have texts only; a name goes first
            return (
                number_in(self._members, value) if isinstance(value, str) else number_of(self._members, value)
            )
        except UsageError as e:
            raise InputError(f"{place(self._path, row(), self.name)}: {e}") from None
