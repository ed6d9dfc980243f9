"""Reads and writes CSV files block by block, with pyarrow.

The first line has the names of the columns, unless the user says that it is a row.

A CSV file has no types. A column of an input is read as what the input takes: float64, int64 or bool. Values
of True and False are read as bool, which becomes 0 or 1. All other columns are texts, so that 007 stays 007.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, UsageError
from .arrow_files import ArrowSink, ArrowTable, BadRow, arrow, column_type, readable, tensor_of, unpacked
from .endings import CSV, text_suffix
from .input_columns import kind_of
from .table import TEXT, ColumnType, place

_TAB = ("tab", "\\t")
_OTHERS = (";", "\t", "|")
_NUMBER = re.compile(r"[+-]?([0-9]+[.,]?[0-9]*|[.,][0-9]+)([eE][+-]?[0-9]+)?")
_VALUES = ("", "nan", "na", "n/a", "null", "none", "inf", "-inf", "true", "false")
_HEAD = 2**16  # bytes that are looked at
_BLOCK = 2**24  # bytes that pyarrow reads at a time; no row may be longer
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_NULLS = ("", "NA", "N/A", "#N/A", "NULL", "null", "None")  # nan is not among them: it is a number
_WRONG = re.compile(r"(?:In CSV column #(\d+): |CSV parse error: )Row #(\d+): (.*)", re.DOTALL)
"""What pyarrow says of a wrong value or row. A header is row 1."""
_COMMAS = re.compile(r"invalid value '[^',]*,[^']*'")
_INFINITE = ("inf", "infinity")
_TYPES = {"float": "float64", "integer": "int64", "bool": "bool_"}


@dataclass(frozen=True)
class CsvForm:
    """How a CSV file is written.

    Attributes:
        header: Whether the first line has the names of the columns. None: it does, and is refused if a name
            is a number.
        delimiter: What stands between values; None for a comma, and in a .tsv file for a tab.
        decimal: What stands before the decimals of a number.
    """

    header: bool | None = None
    delimiter: str | None = None
    decimal: str = "."

    @classmethod
    def of(cls, path: Path, header: Any, delimiter: Any, decimal: Any) -> CsvForm:
        """Checks the options of a user. Raises: UsageError."""
        if header is not None and type(header) is not bool:
            raise UsageError(f"header={header!r:.40} is neither True nor False")
        if isinstance(delimiter, str) and delimiter.lower() in _TAB:
            delimiter = "\t"
        if delimiter is not None and not (
            isinstance(delimiter, str) and len(delimiter) == 1 and delimiter.isascii()
            and delimiter not in '"\r\n\0' and not delimiter.isalnum()
        ):  # fmt: skip  # what a delimiter is not, in one line
            raise UsageError(
                f"delimiter={delimiter!r:.40} is no delimiter; give one character, such as ';', or 'tab'"
            )
        if decimal not in (".", ","):
            raise UsageError(f"decimal={decimal!r:.40} is unknown; give '.' or ','")
        form = cls(header, delimiter, decimal)
        suffix = text_suffix(path)
        if form != cls() and suffix not in CSV:
            raise UsageError(f"{path}: header=, delimiter= and decimal= are for .csv files; leave them out")
        return replace(form, delimiter="\t") if suffix == ".tsv" and delimiter is None else form

    @property
    def separator(self) -> str:
        """What stands between values."""
        return self.delimiter or ","

    def checked_head(self, path: Path) -> str:
        """Returns the first text of a file. Raises: InputError if it is no text in UTF-8; UsageError if the
        first line has another separator.
        """
        with readable(path), unpacked(path) as (_, stream):
            head = bytes(stream.read(_HEAD))
        if head.startswith(_UTF_16) or b"\0" in head:
            what = (
                "is text in UTF-16" if head.startswith(_UTF_16) else "has NUL bytes, and is no text in UTF-8"
            )
            raise InputError(f"{path} {what}; save it as CSV in UTF-8")
        text = head.decode("utf-8-sig", "replace")
        lines = [line.strip("\r") for line in text.split("\n")]
        first = next((line for line in lines if line), "")
        if first.lower().startswith("sep=") and len(first) == 5:
            raise InputError(
                f"{path}: the first line is {first!r}, which is for Excel alone; remove it, and give the "
                "separator with delimiter= (--delimiter)"
            )
        if self.separator in first or self.delimiter is not None:
            return text
        if other := next((s for s in _OTHERS if s in first), None):
            shown, word = ("tabs", "tab") if other == "\t" else (repr(other), other)
            raise UsageError(
                f"{path}: the first line has no {self.separator!r}, but {shown}: {first[:60]!r}. If this is "
                f"what stands between its values, give delimiter={word!r} (--delimiter '{word}'). If the "
                f"file has one column of this name, give delimiter={self.separator!r} (--delimiter "
                f"'{self.separator}')"
            )
        return text

    def names(self, path: Path, first_line: Sequence[str]) -> list[str]:
        """Returns the names of the columns, without spaces around them.

        Args:
            path: The file, for messages.
            first_line: The values of the first line; made-up names for a file without a header.

        Raises:
            InputError: Two columns have one name, or two have none.
            UsageError: A name is a number, so that the line may be a row.
        """
        names = [name.strip() for name in first_line]
        if self.header is None and (why := _like_a_row(names)):
            raise UsageError(
                f"{path}: the first line may be a row, since {why}.\n"
                "If the file has no names, give header=False (--no-header): its columns are f0, f1, ...\n"
                "If these are the names of the columns, give header=True (--header)"
            )
        for k, name in enumerate(names):
            if name in names[:k]:
                first = names.index(name)
                both = f"the columns {first} and {k} (the first one is 0)"
                raise InputError(
                    f"{path}: {both} have {f'the name {name}' if name else 'no name'}; give each column a "
                    "name of its own in the first line, or header=False (--no-header) if it is a row"
                )
        return names


def _like_a_row(names: Sequence[str]) -> str:
    """Returns why the first line may be a row; "" if it has names."""
    if number := next((n for n in names if _NUMBER.fullmatch(n)), None):
        return f"{number} is a number"
    if names and all(n.lower() in _VALUES for n in names):
        return "it has no name: " + ", ".join(n or "(nothing)" for n in names[:4])
    return ""


class CsvTable(ArrowTable):
    """A CSV file.

    Args:
        path: The file.
        form: How it is written.
    """

    typed = False

    def __init__(self, path: Path, form: CsvForm | None = None) -> None:
        self._file: Any = None
        self._form = form or CsvForm()
        self.named = self._form.header is not False
        head = self._form.checked_head(path)
        self.path = path
        pa = arrow()
        with readable(path), unpacked(path) as (file, stream):
            self._size = int(file.size())
            try:
                schema = self._reader(stream, None).schema
            except pa.lib.ArrowInvalid as e:
                if "Empty CSV" not in str(e) or not head.strip() or self._form.header is False:
                    raise self._located(str(e), ()) from e
                # a line of names without an end
                line = next(csv.reader(io.StringIO(head), delimiter=self._form.separator))
                schema = pa.schema([pa.field(name, pa.null()) for name in line])
            try:
                self._stored = list(schema.names)
            except UnicodeDecodeError:
                raise InputError(
                    f"{path}: the names of the columns are no text in UTF-8; save it as CSV in UTF-8"
                ) from None
        names = self._form.names(path, self._stored)
        rows = 0 if self._has_names_alone(schema) else None
        super().__init__(path, pa.schema([f.with_name(n) for f, n in zip(schema, names)]), rows)

    def _has_names_alone(self, schema: Any) -> bool:
        """Returns whether the file has no rows. Then a column may be of any type."""
        if not all(arrow().types.is_null(field.type) for field in schema):
            return False
        with readable(self.path), unpacked(self.path) as (_, stream):
            try:
                return not any(batch.num_rows for batch in self._reader(stream, None))
            except arrow().lib.ArrowInvalid:
                return True

    def type_of(self, field: Any) -> ColumnType:
        """Returns what the values of the first rows look like. Other than numbers, all are texts."""
        if arrow().types.is_null(field.type):
            return ColumnType("no values", TEXT if self.rows is None else "float64")
        column = column_type(field.type)
        return column if column.dtype in ("int64", "float64", "bool") else ColumnType("text", TEXT)

    def empty(self, names: Sequence[str]) -> Any:
        pa = arrow()
        return pa.record_batch([pa.array([], pa.string())] * len(names), names=list(names))

    def position(self, rows: int) -> tuple[int, int]:
        if self.rows is not None or self._file is None or self._file.closed:
            return super().position(rows)
        return int(self._file.tell()), self._size

    def batches(self, names: Sequence[str], dtypes: Mapping[str, torch.dtype], rows: int) -> Iterator[Any]:
        if self.rows == 0:
            return
        types = {n: self._read_as(n, dtypes.get(n)) for n in names}
        floats = [n for n in names if types[n] == arrow().float64()]
        with unpacked(self.path) as (self._file, stream):
            texts: Iterator[Any] | None = None
            start = 0
            for k, batch in enumerate(self._parsed(stream, types)):
                if texts is None and any(_infinite(batch.column(n)) for n in floats):
                    texts = self._texts(floats, k)
                if texts is not None:
                    self._check_infinities(batch, next(texts), floats, start)
                start += batch.num_rows
                yield batch

    def _read_as(self, name: str, dtype: torch.dtype | None) -> Any:
        """Returns the type of Arrow that a column is read as. dtype: that it is needed in; None for texts."""
        pa = arrow()
        if dtype is None:
            return pa.string()
        if kind_of(dtype) != "bool" and self.columns[name].dtype == "bool":
            return pa.bool_()
        return getattr(pa, _TYPES[kind_of(dtype)])()

    def _parsed(self, file: Any, types: Mapping[str, Any]) -> Iterator[Any]:
        """Reads record batches with columns of these types, in their order."""
        by_name = dict(zip(self.columns, self._stored))
        try:
            for batch in self._reader(file, {by_name[n]: t for n, t in types.items()}):
                yield batch.rename_columns(list(types))
        except arrow().lib.ArrowInvalid as e:
            raise self._located(str(e), list(self.columns)) from e

    def _texts(self, names: Sequence[str], skip: int) -> Iterator[Any]:
        """Reads the batches after the first ones again, as texts."""
        pa = arrow()
        with unpacked(self.path) as (_, stream):
            for k, batch in enumerate(self._parsed(stream, dict.fromkeys(names, pa.string()))):
                if k >= skip:
                    yield batch

    def _check_infinities(self, batch: Any, texts: Any, names: Sequence[str], start: int) -> None:
        """Raises: InputError for a number that is too large for float64, which pyarrow reads as infinite."""
        for name in names:
            for row in _infinite(batch.column(name)):
                text = texts.column(name)[row].as_py().strip()
                if text.lower().lstrip("+-") not in _INFINITE:
                    raise InputError(
                        f"{place(self.path, start + row, name)}: {text[:40]}: it is above the largest number "
                        "of float64; change the value"
                    )

    def _located(self, message: str, columns: Sequence[str]) -> InputError:
        """Returns an error of pyarrow with the row and the column of the file."""
        match = _WRONG.match(message)
        if "straddling object" in message:
            return InputError(
                f"{self.path}: a row is longer than {_BLOCK >> 20} MB, or a quote has no end; give a "
                ".parquet file, or close the quote"
            )
        if "Empty CSV" in message:
            return InputError(f"{self.path}: the file has no rows, and no line of names")
        if match is None:
            return InputError(f"{self.path}: {message.splitlines()[0][:300]}")
        column, line, what = match.groups()
        name = None if column is None or not columns else columns[int(column)]
        row = int(line) - (1 if self._form.header is False else 2)
        what = what.splitlines()[0][:300]
        if _COMMAS.search(what) and self._form.decimal == ".":
            what += "; give decimal=',' (--decimal ,) for decimal commas, and remove separators of thousands"
        if "invalid UTF8" in what:
            what += "; save the file as CSV in UTF-8"
        return InputError(f"{place(self.path, row, name)}: {what}")

    def _reader(self, file: Any, types: Mapping[str, Any] | None) -> Any:
        """Opens the file. types: of the columns to read; None for the types that the first rows have."""
        form, arrow_csv = self._form, arrow().csv
        single = types is not None and len(self._stored) == 1
        return arrow_csv.open_csv(
            file,
            read_options=arrow_csv.ReadOptions(
                use_threads=False, block_size=_BLOCK, autogenerate_column_names=form.header is False
            ),
            # values in quotes may have several lines; an empty line of a single column is an empty value
            parse_options=arrow_csv.ParseOptions(
                newlines_in_values=True, delimiter=form.separator, ignore_empty_lines=not single
            ),
            convert_options=arrow_csv.ConvertOptions(
                column_types=types,
                include_columns=None if types is None else list(types),
                null_values=list(_NULLS),
                strings_can_be_null=False,
                decimal_point=form.decimal,
            ),
        )


def _infinite(column: Any) -> list[int]:
    """Returns the rows with an infinite number."""
    pc = arrow().compute
    rows: list[int] = pc.indices_nonzero(pc.fill_null(pc.is_inf(column), False)).to_pylist()
    return rows


class CsvSink(ArrowSink):
    """A CSV file: one column for each number, `output.0`, `output.1`, ... delimiter: between values."""

    def __init__(self, path: Path, metadata: Mapping[str, str], delimiter: str = ",") -> None:
        super().__init__(path, metadata)
        self._delimiter = delimiter

    def opened(self, schema: Any, columns: Mapping[str, Any]) -> Any:
        options = arrow().csv.WriteOptions(delimiter=self._delimiter)
        return arrow().csv.CSVWriter(str(self.path), schema.remove_metadata(), write_options=options)

    def prepared(self, columns: Mapping[str, Any]) -> Mapping[str, Any]:
        prepared: dict[str, Any] = {}
        for name, value in columns.items():
            for part, numbers in self._parts(name, value).items():
                if part in prepared:
                    raise UsageError(f"two columns of the CSV file would have the name {part}; leave one out")
                prepared[part] = numbers
        return prepared

    def _parts(self, name: str, value: Any) -> dict[str, Any]:
        """Returns the columns of one column. Raises: UsageError for lists of texts, or of several lengths."""
        if not isinstance(value, Tensor):
            type_ = column_type(value.type)
            if type_.shape == () and not arrow().types.is_nested(value.type):
                return {name: value}
            try:
                if not type_.dtype or type_.dtype == "text":
                    raise BadRow(0, f"it holds {type_.text}")
                value = tensor_of(value)
            except BadRow as e:
                raise UsageError(
                    f"the column {name} cannot become columns of a CSV file: {e}. Write .parquet, or name "
                    "the columns to pass on with ids= (--id)"
                ) from None
        places = list(product(*map(range, value.shape[1:])))
        flat = value.reshape(value.shape[0], len(places))
        return {".".join([name, *map(str, at)]): flat[:, k] for k, at in enumerate(places)}
