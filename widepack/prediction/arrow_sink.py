"""Writes Parquet, Arrow and CSV files block by block, with pyarrow."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import UsageError
from .arrow_columns import BadRow, array_of, column_type, field_of, tensor_of
from .arrow_package import arrow, writable

_GROUP_ROWS, _GROUP_BYTES = 2**16, 2**25
"""A row group of a Parquet file ends at one of these."""


class ArrowSink(ABC):
    """A file of one of the formats that pyarrow writes.

    Args:
        path: The file.
        metadata: Texts for the metadata of the schema.
    """

    def __init__(self, path: Path, metadata: Mapping[str, str]) -> None:
        self.path, self.metadata = path, metadata
        self._schema: Any = None
        self._writer: Any = None

    def write(self, columns: Mapping[str, Any]) -> None:
        """Writes rows. columns: tensors `[rows, ...]`, and arrays that are passed on."""
        pa = arrow()
        columns = self.prepared(columns)
        with writable(self.path):
            if self._writer is None:
                fields = [field_of(name, value) for name, value in columns.items()]
                self._schema = pa.schema(fields, metadata=dict(self.metadata))
                self._writer = self.opened(self._schema, columns)
            arrays = [array_of(v) if isinstance(v, Tensor) else v for v in columns.values()]
            self.put(self._writer, pa.record_batch(arrays, schema=self._schema))

    def prepared(self, columns: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the columns in the form that the format has."""
        return columns

    @abstractmethod
    def opened(self, schema: Any, columns: Mapping[str, Any]) -> Any:
        """Returns the writer of pyarrow."""

    def put(self, writer: Any, batch: Any) -> None:
        """Writes a record batch."""
        writer.write_batch(batch)

    def close(self) -> None:
        """Writes what is left, and closes the file."""
        if self._writer is not None:
            with writable(self.path):
                self._writer.close()


class ParquetSink(ArrowSink):
    """A Parquet file. Record batches are collected until they make a row group."""

    def __init__(self, path: Path, metadata: Mapping[str, str]) -> None:
        super().__init__(path, metadata)
        self._kept: list[Any] = []
        self._rows = self._bytes = 0

    def opened(self, schema: Any, columns: Mapping[str, Any]) -> Any:
        passed_on = [name for name, value in columns.items() if not isinstance(value, Tensor)]
        # answers are hardly ever equal, and a dictionary of them would be built for nothing
        return arrow().parquet.ParquetWriter(str(self.path), schema, use_dictionary=passed_on or False)

    def put(self, writer: Any, batch: Any) -> None:
        self._kept.append(batch)
        self._rows += batch.num_rows
        self._bytes += batch.nbytes
        if self._rows >= _GROUP_ROWS or self._bytes >= _GROUP_BYTES:
            self._end_group()

    def _end_group(self) -> None:
        if self._kept:
            self._writer.write_table(
                arrow().Table.from_batches(self._kept), row_group_size=max(1, self._rows)
            )
        self._kept, self._rows, self._bytes = [], 0, 0

    def close(self) -> None:
        if self._writer is not None:
            with writable(self.path):
                self._end_group()
        super().close()


class IpcSink(ArrowSink):
    """An Arrow file (Feather version 2)."""

    def opened(self, schema: Any, columns: Mapping[str, Any]) -> Any:
        return arrow().ipc.new_file(str(self.path), schema)


class CsvSink(ArrowSink):
    """A CSV file: one column for each number, `output.0`, `output.1`, ..."""

    def opened(self, schema: Any, columns: Mapping[str, Any]) -> Any:
        return arrow().csv.CSVWriter(str(self.path), schema.remove_metadata())

    def prepared(self, columns: Mapping[str, Any]) -> Mapping[str, Any]:
        found: dict[str, Any] = {}
        for name, value in columns.items():
            for part, numbers in self._parts(name, value).items():
                if part in found:
                    raise UsageError(f"two columns of the CSV file would have the name {part}; leave one out")
                found[part] = numbers
        return found

    def _parts(self, name: str, value: Any) -> dict[str, Any]:
        """Returns the columns of one column. Raises: UsageError for lists of texts, or of several lengths."""
        if not isinstance(value, Tensor):
            type_ = column_type(value.type)
            if type_.shape == ():
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
