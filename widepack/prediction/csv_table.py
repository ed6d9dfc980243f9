"""Reads CSV files block by block, with pyarrow. The first line has the names of the columns.

A CSV file has no types. A column of an input is read as what the input takes: float64, int64 or bool. All
other columns are texts, so that 007 stays 007.
"""

from __future__ import annotations

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
_TYPES = {"float": "float64", "integer": "int64", "bool": "bool_"}


class CsvTable(ArrowTable):
    """A CSV file with a header."""

    typed = False

    def __init__(self, path: Path) -> None:
        self._file: Any = None
        with readable(path), arrow().OSFile(str(path)) as file:
            self._size = int(file.size())
            reader = arrow().csv.open_csv(file, parse_options=_parsing(path), convert_options=_conversion())
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
                yield from _reader(self.path, self._file, types)
            except pa.lib.ArrowInvalid as e:
                if "CSV conversion error" not in str(e):
                    raise
                self._find_bad_value(types)
                raise

    def _find_bad_value(self, types: Mapping[str, Any]) -> None:
        """Reads the file again, as texts. Raises: InputError that names the row with a value of another
        type.
        """
        pa = arrow()
        start = 0
        with pa.OSFile(str(self.path)) as file:
            for batch in _reader(self.path, file, dict.fromkeys(types, pa.string())):
                for name, type_ in types.items():
                    row = _first_bad(batch.column(name), type_)
                    if row is not None:
                        value = batch.column(name)[row].as_py()
                        raise InputError(
                            f"{place(self.path, start + row, name)}: {value[:60]!r} is not a value of "
                            f"{type_}, which the input takes"
                        )
                start += batch.num_rows


def _reader(path: Path, file: Any, types: Mapping[str, Any]) -> Any:
    pa = arrow()
    return pa.csv.open_csv(file, parse_options=_parsing(path), convert_options=_conversion(types))


def _parsing(path: Path) -> Any:
    """Returns the options of parsing: values in quotes may have several lines."""
    pa = arrow()

    def refused(row: Any) -> str:
        # `number` counts lines, the header is line 1; it is None where pyarrow does not count
        where = f"{path}" if row.number is None else place(path, row.number - 2)
        raise InputError(
            f"{where}: {row.actual_columns} values, and the header has {row.expected_columns}: "
            f"{row.text[:60]!r}"
        )

    return pa.csv.ParseOptions(newlines_in_values=True, invalid_row_handler=refused)


def _conversion(types: Mapping[str, Any] | None = None) -> Any:
    pa = arrow()
    return pa.csv.ConvertOptions(
        column_types=types,
        include_columns=None if types is None else list(types),
        null_values=list(_NULLS),
        strings_can_be_null=False,
    )


def _first_bad(texts: Any, type_: Any) -> int | None:
    """Returns the first text that is not a value of a type; None if all are. Nulls are not looked at."""
    pa = arrow()
    wanted = pa.compute.if_else(pa.compute.is_in(texts, pa.array(_NULLS)), None, texts)
    try:
        wanted.cast(type_)
    except pa.lib.ArrowInvalid:
        if len(texts) == 1:
            return 0
        half = len(texts) // 2
        found = _first_bad(texts.slice(0, half), type_)
        if found is not None:
            return found
        rest = _first_bad(texts.slice(half), type_)
        return None if rest is None else half + rest
    return None
