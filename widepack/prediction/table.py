"""Defines what every input file looks like to the rest of the room: columns, and blocks of rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ..spec.dtypes import dtype_of

TEXT = "text"


@dataclass(frozen=True, slots=True)
class ColumnType:
    """The type of a column.

    Attributes:
        text: The type as the file names it, for messages.
        dtype: The dtype of its numbers, as torch names it; `text` for texts; "" for all others.
        shape: The shape of a row. None is a size that is not the same for every row by the type.
    """

    text: str
    dtype: str
    shape: tuple[int | None, ...] = ()

    @property
    def is_number(self) -> bool:
        """Whether each row is one integer or float. A bool is not a number."""
        return (
            self.shape == () and self.dtype not in ("", TEXT, "bool") and not dtype_of(self.dtype).is_complex
        )


class RowBlock(Protocol):
    """Consecutive rows of a file.

    Attributes:
        start: The number of the first row in the file.
        rows: The number of rows.
    """

    start: int
    rows: int

    def tensor(self, name: str) -> Tensor:
        """Returns the numbers of a column, `[rows, ...]`, in the dtype of the file.

        Raises: InputError for a null, and for lists of several lengths.
        """

    def filled(self, name: str) -> tuple[Tensor, Tensor | None]:
        """Returns the numbers of a column with 0 for each null, and where the nulls are; None for nowhere.

        Raises: InputError for a list that is null, and for lists of several lengths.
        """

    def values(self, name: str) -> tuple[list[Any], Tensor]:
        """Returns the different values of a column, and for each row the number of its value.

        Raises: InputError for a null.
        """

    def column(self, name: str) -> Any:
        """Returns a column as the format stores it, to pass it on."""


class Table(Protocol):
    """An opened input file.

    Attributes:
        path: The file.
        columns: The type of each column, in the order of the file.
        rows: The number of rows; None if only reading all of the file tells it.
        index: The columns that the writer of the file marked as the index of its rows.
        named: Whether the file itself names its columns.
        typed: Whether its columns have types. False: a column is text unless an input is read from it.
    """

    path: Path
    named: bool
    typed: bool
    index: frozenset[str]
    columns: Mapping[str, ColumnType]
    rows: int | None

    def blocks(
        self, names: Sequence[str], dtypes: Mapping[str, torch.dtype], rows: int
    ) -> Iterator[RowBlock]:
        """Reads the file block by block.

        Args:
            names: The columns to read.
            dtypes: The dtype that a column is needed in, for files whose columns have no types.
            rows: The number of rows of every block except the last one.
        """

    def count(self) -> int:
        """Returns the number of rows, and reads all of the file for it if there is no other way."""

    def position(self, rows: int) -> tuple[int, int]:
        """Returns how much is done after a number of rows, and how much there is, both in one unit."""


def place(path: Path, row: int, column: str | None = None) -> str:
    """Returns where something is in a file, for messages."""
    return f"{path}: row {row} (the first row is 0)" + ("" if column is None else f", column {column}")
