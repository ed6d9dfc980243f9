"""Reads Parquet and Arrow files block by block, with pyarrow."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from widepack_artifacts import strict_json

from ..errors import ArtifactError, InputError
from .arrow_columns import BadRow, column_type, plain, tensor_of, values_of
from .arrow_package import arrow, readable
from .table import ColumnType, place

_BUFFER = 2**17  # bytes that are read of each column of a Parquet file at a time


class ArrowBlock:
    """Consecutive rows of a table."""

    def __init__(self, path: Path, start: int, batch: Any) -> None:
        self.start, self.rows = start, int(batch.num_rows)
        self._path, self._batch = path, batch

    def tensor(self, name: str) -> Tensor:
        try:
            return tensor_of(self._batch.column(name))
        except BadRow as e:
            raise InputError(f"{place(self._path, self.start + e.row, name)}: {e}") from None

    def values(self, name: str) -> tuple[list[Any], Tensor]:
        try:
            return values_of(self._batch.column(name))
        except BadRow as e:
            raise InputError(f"{place(self._path, self.start + e.row, name)}: {e}") from None

    def column(self, name: str) -> Any:
        return plain(self._batch.column(name))


class ArrowTable(ABC):
    """An opened file of one of the formats that pyarrow reads."""

    rows: int | None
    typed = True

    def __init__(self, path: Path, schema: Any, rows: int | None) -> None:
        self.path, self.rows = path, rows
        self._schema = schema
        self.index = _index_of_pandas(schema)
        names = list(schema.names)
        if twice := sorted({n for n in names if names.count(n) > 1}):
            raise InputError(f"{path}: two columns have the name {twice[0]!r}; rename one in the file")
        self.columns: Mapping[str, ColumnType] = {
            field.name: self.type_of(field) for field in (schema.field(i) for i in range(len(names)))
        }

    def type_of(self, field: Any) -> ColumnType:
        """Returns the type of a column."""
        return column_type(field.type)

    @abstractmethod
    def batches(self, names: Sequence[str], dtypes: Mapping[str, torch.dtype], rows: int) -> Iterator[Any]:
        """Reads record batches of any size, with some columns. rows: the size that is wanted."""

    def blocks(
        self, names: Sequence[str], dtypes: Mapping[str, torch.dtype], rows: int
    ) -> Iterator[ArrowBlock]:
        start = 0
        with readable(self.path):
            for batch in _of_one_size(self.batches(names, dtypes, rows), rows):
                yield ArrowBlock(self.path, start, batch)
                start += batch.num_rows
            if not start:
                yield ArrowBlock(self.path, 0, self.empty(names))

    def empty(self, names: Sequence[str]) -> Any:
        """Returns some columns without rows."""
        pa = arrow()
        schema = pa.schema([self._schema.field(n) for n in names])
        return pa.record_batch([pa.array([], field.type) for field in schema], schema=schema)

    def count(self) -> int:
        if self.rows is None:
            first = next(iter(self.columns))
            with readable(self.path):
                self.rows = sum(b.num_rows for b in self.batches([first], {}, 2**16))
        return self.rows

    def position(self, rows: int) -> tuple[int, int]:
        return rows, rows if self.rows is None else self.rows


def _index_of_pandas(schema: Any) -> frozenset[str]:
    """Returns the columns that pandas marks as the index of a table, in the metadata of the file."""
    try:
        found = strict_json.parse((schema.metadata or {}).get(b"pandas", b"{}"), "the metadata of pandas")
        columns = found["index_columns"] if isinstance(found, dict) else ()
        return frozenset(c for c in columns if isinstance(c, str))
    except (KeyError, TypeError, ArtifactError):
        return frozenset()  # metadata of another writer say nothing


def _of_one_size(batches: Iterator[Any], rows: int) -> Iterator[Any]:
    """Splits and joins record batches, so that all but the last have one number of rows."""
    pa = arrow()
    parts: list[Any] = []
    held = 0
    for batch in batches:
        at = 0
        while at < batch.num_rows:
            part = batch.slice(at, rows - held)
            parts.append(part)
            held += part.num_rows
            at += part.num_rows
            if held == rows:
                yield _joined(pa, parts)
                parts, held = [], 0
    if parts:
        yield _joined(pa, parts)


def _joined(pa: Any, parts: list[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    return pa.Table.from_batches(parts).unify_dictionaries().combine_chunks().to_batches()[0]


class ParquetTable(ArrowTable):
    """A Parquet file. Pages are read one after the other, so that large row groups take little memory."""

    def __init__(self, path: Path) -> None:
        with readable(path):
            self._file = arrow().parquet.ParquetFile(path, buffer_size=_BUFFER, pre_buffer=False)
            super().__init__(path, self._file.schema_arrow, int(self._file.metadata.num_rows))

    def batches(self, names: Sequence[str], dtypes: Mapping[str, torch.dtype], rows: int) -> Iterator[Any]:
        threads = torch.get_num_threads() > 1
        yield from self._file.iter_batches(batch_size=rows, columns=list(names), use_threads=threads)


def _rows_of(reader: Any) -> int:
    """Returns the number of rows of an Arrow file. Older versions of pyarrow have to open the batches."""
    if hasattr(reader, "count_rows"):
        return int(reader.count_rows())
    return sum(reader.get_batch(i).num_rows for i in range(reader.num_record_batches))


class IpcTable(ArrowTable):
    """An Arrow file (Feather version 2) or an Arrow stream. The file is mapped into memory."""

    def __init__(self, path: Path) -> None:
        with readable(path):
            with open(path, "rb") as file:
                self._is_file = file.read(6) == b"ARROW1"
            self._mapped = arrow().memory_map(str(path))
            reader = self._reader()
            super().__init__(path, reader.schema, _rows_of(reader) if self._is_file else None)

    def _reader(self) -> Any:
        pa = arrow()
        self._mapped.seek(0)
        return (pa.ipc.open_file if self._is_file else pa.ipc.open_stream)(self._mapped)

    def position(self, rows: int) -> tuple[int, int]:
        return (rows, self.rows) if self.rows is not None else (self._mapped.tell(), self._mapped.size())

    def batches(self, names: Sequence[str], dtypes: Mapping[str, torch.dtype], rows: int) -> Iterator[Any]:
        # All columns are opened: a reader that is given some of them copies a whole record batch into memory.
        reader = self._reader()
        count = reader.num_record_batches if self._is_file else None
        batches = reader if count is None else map(reader.get_batch, range(count))
        for batch in batches:
            yield batch.select(list(names))
