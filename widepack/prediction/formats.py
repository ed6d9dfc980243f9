"""Chooses how a file is read or written, by the ending of its name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from ..errors import UsageError
from ..system.atomic_file import naming, whole
from .table import Table

ARROW = (".parquet", ".arrow", ".feather", ".csv")
TENSORS = (".npy", ".safetensors")
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")


class FileSink(Protocol):
    """A file that is written block by block."""

    def write(self, columns: Mapping[str, Any]) -> None:
        """Writes rows: the same columns at every call."""

    def close(self) -> None:
        """Writes what is left, and closes the file."""


def suffix_of(path: Path, what: str) -> str:
    """Returns the ending of a path in lower case. what: of the argument. Raises: UsageError."""
    suffix = path.suffix.lower()
    if suffix in COMPRESSED:
        raise UsageError(
            f"{what} {path}: the file is compressed as a whole; {what} takes {path.stem}, unpacked"
        )
    if suffix not in (*ARROW, *TENSORS):
        if path.is_dir():
            raise UsageError(f"{what} {path}: is a folder; give the files in it one by one")
        raise UsageError(
            f"{what} {path}: the ending {suffix or 'is missing, and'} names no known format; known: "
            f"{', '.join((*ARROW, *TENSORS))}"
        )
    return suffix


def open_table(path: Path, form: Any = None) -> Table:
    """Opens an input file. form: of a CSV file. Raises: UsageError; InputError; OSError; Unavailable."""
    suffix = suffix_of(path, "input")
    if not path.is_file():
        what = "is a folder; give the files in it one by one" if path.is_dir() else "there is no such file"
        raise UsageError(f"input {path}: {what}")
    if suffix in TENSORS:
        from .tensor_files import open_npy, open_safetensors

        return open_npy(path) if suffix == ".npy" else open_safetensors(path)
    if suffix == ".csv":
        from .csv_files import CsvTable

        return CsvTable(path, form)
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
    if suffix == ".csv":
        from .csv_files import CsvSink

        return CsvSink(path, metadata)
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
