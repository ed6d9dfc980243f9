"""Reads a folder of Parquet files as one table: the rows of each file after those of the file before.

A folder `name=value` above a file is a column of texts: `tenant=eu/part-0.parquet`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import torch

from ..errors import InputError, UsageError
from .arrow_files import ArrowTable, ParquetTable, arrow, readable
from .endings import files_of


class FolderTable(ArrowTable):
    """A folder of Parquet files with the same columns, in the order of their paths."""

    def __init__(self, path: Path) -> None:
        self.path, self._files = path, files_of(path)
        if wrong := next((f for f in self._files if f.suffix.lower() != ".parquet"), None):
            raise UsageError(
                f"input {path}: a folder may have .parquet files only, and has {wrong.relative_to(path)}; "
                "give a folder without it, or the files one by one"
            )
        if not self._files:
            raise UsageError(f"input {path}: the folder has no .parquet file")
        found: list[Any] = []
        for file in self._files:
            with readable(file):
                found.append(arrow().parquet.read_metadata(file))
        schemas = [self._schema_of(file, one) for file, one in zip(self._files, found)]
        for file, schema in zip(self._files, schemas):
            if difference := _difference(_columns(schema), _columns(schemas[0])):
                raise InputError(f"{file}: {difference}; all files of a folder have the same columns")
        super().__init__(path, schemas[0], sum(int(one.num_rows) for one in found))

    def _schema_of(self, file: Path, metadata: Any) -> Any:
        """Returns the columns of a file and of the folders above it."""
        pa = arrow()
        schema = metadata.schema.to_arrow_schema()
        for name in _texts_above(self.path, file):
            schema = schema.append(pa.field(name, pa.string()))
        return schema

    def batches(self, names: Sequence[str], dtypes: Mapping[str, torch.dtype], rows: int) -> Iterator[Any]:
        pa = arrow()
        for file in self._files:
            texts = _texts_above(self.path, file)
            stored = [n for n in self.columns if n not in texts]
            wanted = [n for n in names if n in stored] or stored[:1]
            for batch in ParquetTable(file).batches(wanted, dtypes, rows):
                arrays = [
                    pa.array([texts[n]] * batch.num_rows, pa.string()) if n in texts else batch.column(n)
                    for n in names
                ]
                yield pa.record_batch(arrays, names=list(names))


def _texts_above(folder: Path, file: Path) -> dict[str, str]:
    """Returns the columns that the folders above a file name: `{"tenant": "eu"}`."""
    pairs = (part.split("=", 1) for part in file.relative_to(folder).parts[:-1] if "=" in part)
    return {unquote(name): unquote(value) for name, value in pairs}


def _columns(schema: Any) -> dict[str, str]:
    return {field.name: str(field.type) for field in schema}


def _difference(columns: Mapping[str, str], first: Mapping[str, str]) -> str:
    """Returns the first difference between the columns of a file and those of the first file; "" for none."""
    for name in (*first, *columns):
        if name not in columns or name not in first:
            return f"the column {name} is {'not ' if name in first else ''}in it, unlike the first file"
        if columns[name] != first[name]:
            return f"the column {name} is {columns[name]}, and {first[name]} in the first file"
    return ""
