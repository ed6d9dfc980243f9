"""Reads CSV files block by block, with pyarrow. The first line has the names of the columns.

A CSV file has no types. A column of an input is read as what the input takes: float64, int64 or bool. All
other columns are texts, so that 007 stays 007.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import InputError
from .arrow_columns import column_type
from .arrow_package import arrow, readable
from .arrow_table import ArrowTable
from .conversion import kind_of
from .table import TEXT, ColumnType, place

_NULLS = ("", "NA", "N/A", "#N/A", "NULL", "null", "None")  # nan is not among them: it is a number
_WRONG = re.compile(r"(?:In CSV column #(\d+): |CSV parse error: )Row #(\d+): (.*)", re.DOTALL)
"""What pyarrow says of a wrong value or row. The header is row 1."""
_TYPES = {"float": "float64", "integer": "int64", "bool": "bool_"}


class CsvTable(ArrowTable):
    """A CSV file with a header."""

    typed = False

    def __init__(self, path: Path) -> None:
        self._file: Any = None
        with readable(path), arrow().OSFile(str(path)) as file:
            self._size = int(file.size())
            try:
                reader = _reader(file, None)
            except arrow().lib.ArrowInvalid as e:
                raise _located(path, str(e), ()) from e
            super().__init__(path, reader.schema, None)

    def type_of(self, field: Any) -> ColumnType:
        """Returns what the values of the first rows look like. Other than numbers, all are texts."""
        found = column_type(field.type)
        return found if found.dtype in ("int64", "float64", "bool") else ColumnType("text", TEXT)

    def empty(self, names: Sequence[str]) -> Any:
        pa = arrow()
        return pa.record_batch([pa.array([], pa.string())] * len(names), names=list(names))

    def position(self, rows: int) -> tuple[int, int]:
        if self.rows is not None or self._file is None or self._file.closed:
            return super().position(rows)
        return int(self._file.tell()), self._size

    def batches(self, names: Sequence[str], dtypes: Mapping[str, torch.dtype], rows: int) -> Iterator[Any]:
        pa = arrow()
        types = {n: getattr(pa, _TYPES[kind_of(dtypes[n])])() if n in dtypes else pa.string() for n in names}
        with pa.OSFile(str(self.path)) as self._file:
            try:
                yield from _reader(self._file, types)
            except pa.lib.ArrowInvalid as e:
                raise _located(self.path, str(e), list(self.columns)) from e


def _located(path: Path, message: str, columns: Sequence[str]) -> InputError:
    """Returns an error of pyarrow with the row and the column of the file."""
    found = _WRONG.match(message)
    if found is None:
        return InputError(f"{path}: {message.splitlines()[0][:300]}")
    column, line, what = found.groups()
    name = None if column is None else columns[int(column)]
    return InputError(f"{place(path, int(line) - 2, name)}: {what.splitlines()[0][:300]}")


def _reader(file: Any, types: Mapping[str, Any] | None) -> Any:
    pa = arrow()
    return pa.csv.open_csv(
        file,
        read_options=pa.csv.ReadOptions(use_threads=False),
        parse_options=_parsing(),
        convert_options=_conversion(types),
    )


def _parsing() -> Any:
    """Returns the options of parsing: values in quotes may have several lines."""
    return arrow().csv.ParseOptions(newlines_in_values=True)


def _conversion(types: Mapping[str, Any] | None) -> Any:
    pa = arrow()
    return pa.csv.ConvertOptions(
        column_types=types,
        include_columns=None if types is None else list(types),
        null_values=list(_NULLS),
        strings_can_be_null=False,
    )
