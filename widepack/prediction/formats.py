"""Opens files to read and to write, by the ending of their names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from ..errors import UsageError
from ..system.atomic_file import naming, whole
from .endings import ARROW, CSV, LINES, TENSORS, suffix_of
from .table import Table


class FileSink(Protocol):
    """A file that is written block by block."""

    def write(self, columns: Mapping[str, Any]) -> None:
        """Writes rows: the same columns at every call."""

    def close(self) -> None:
        """Writes what is left, and closes the file."""


def open_table(path: Path, form: Any = None) -> Table:
    """Opens an input file. form: of a CSV file. Raises: UsageError; InputError; OSError; Unavailable."""
    suffix = suffix_of(path, "input")
    if path.is_dir():
        from .folder_files import FolderTable

        return FolderTable(path)
    if not path.is_file():
        raise UsageError(f"input {path}: there is no such file")
    if suffix in TENSORS:
        from .tensor_files import open_npy, open_safetensors

        return open_npy(path) if suffix == ".npy" else open_safetensors(path)
    if suffix in CSV:
        from .csv_files import CsvTable

        return CsvTable(path, form)
    if suffix in LINES:
        from .json_files import JsonTable

        return JsonTable(path)
    from .arrow_files import IpcTable, ParquetTable

    return ParquetTable(path) if suffix == ".parquet" else IpcTable(path)


class _NamedSink:
    """A sink whose errors name the user's file, not the temporary one."""

    def __init__(self, sink: FileSink, path: Path) -> None:
        self._sink, self._path = sink, path

    def write(self, columns: Mapping[str, Any]) -> None:
        with naming(self._path):
            self._sink.write(columns)

    def close(self) -> None:
        with naming(self._path):
            self._sink.close()


@contextlib.contextmanager
def output_file(
    path: Path, force: bool, metadata: Mapping[str, str], rows: Callable[[], int]
) -> Iterator[FileSink]:
    """Yields an output file, which appears whole at the end, or not at all if the block raises.

    Args:
        path: The file.
        force: Whether to replace an existing one.
        metadata: Texts that the file keeps, where the format has a place for them.
        rows: Returns the number of rows that will be written, for the format that needs it first.

    Raises: as `whole`.
    """
    with whole(path, force) as made:
        sink = _NamedSink(_opened(suffix_of(path, "output"), made, metadata, rows), path)
        try:
            yield sink
        except BaseException:
            with contextlib.suppress(Exception):  # the first error counts
                sink.close()
            raise
        sink.close()


def _opened(suffix: str, path: Path, metadata: Mapping[str, str], rows: Callable[[], int]) -> FileSink:
    if suffix in TENSORS:
        from .tensor_files import NpySink, SafetensorsSink

        return NpySink(path) if suffix == ".npy" else SafetensorsSink(path, rows(), metadata)
    if suffix in CSV:
        from .csv_files import CsvSink

        return CsvSink(path, metadata, "\t" if suffix == ".tsv" else ",")
    from .arrow_files import IpcSink, ParquetSink

    return ParquetSink(path, metadata) if suffix == ".parquet" else IpcSink(path, metadata)


def check_package(suffix: str) -> None:
    """Imports what a format needs. Raises: Unavailable."""
    if suffix in ARROW:
        from .arrow_files import arrow

        arrow()
    elif suffix == ".npy":
        from .tensor_files import numpy_format

        numpy_format()
