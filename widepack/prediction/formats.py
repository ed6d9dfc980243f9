"""Chooses how a file is read or written, by the ending of its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from ..errors import UsageError
from .csv_form import CsvForm
from .table import Table

ARROW = (".parquet", ".arrow", ".feather", ".csv")
TENSORS = (".npy", ".safetensors")


class FileSink(Protocol):
    """A file that is written block by block."""

    def write(self, columns: Mapping[str, Any]) -> None:
        """Writes rows: the same columns at every call."""

    def close(self) -> None:
        """Writes what is left, and closes the file."""


def suffix_of(path: Path, what: str) -> str:
    """Returns the ending of a path in lower case. what: of the argument. Raises: UsageError."""
    found = path.suffix.lower()
    if found not in (*ARROW, *TENSORS):
        raise UsageError(
            f"{what} {path}: the ending {found or 'is missing, and'} names no known format; known: "
            f"{', '.join((*ARROW, *TENSORS))}"
        )
    return found


def open_table(path: Path, form: CsvForm | None = None) -> Table:
    """Opens an input file. form: of a CSV file. Raises: UsageError; InputError; OSError; Unavailable."""
    suffix = suffix_of(path, "input")
    if not path.is_file():
        what = "is a folder; give the files in it one by one" if path.is_dir() else "there is no such file"
        raise UsageError(f"input {path}: {what}")
    if suffix in TENSORS:
        from .tensor_table import open_npy, open_safetensors

        return open_npy(path) if suffix == ".npy" else open_safetensors(path)
    from .arrow_table import IpcTable, ParquetTable
    from .csv_table import CsvTable

    if suffix == ".csv":
        return CsvTable(path, form)
    return ParquetTable(path) if suffix == ".parquet" else IpcTable(path)


def open_sink(suffix: str, path: Path, metadata: Mapping[str, str], rows: Callable[[], int]) -> FileSink:
    """Opens a file to write.

    Args:
        suffix: The format.
        path: The file, whatever its ending is.
        metadata: Texts that the file keeps, where the format has a place for them.
        rows: Returns the number of rows that will be written, for the format that needs it first.
    """
    if suffix in TENSORS:
        from .tensor_sink import NpySink, SafetensorsSink

        return NpySink(path) if suffix == ".npy" else SafetensorsSink(path, rows(), metadata)
    from .arrow_sink import CsvSink, IpcSink, ParquetSink

    return {".parquet": ParquetSink, ".csv": CsvSink}.get(suffix, IpcSink)(path, metadata)


def check_package(suffix: str) -> None:
    """Imports what a format needs. Raises: Unavailable."""
    if suffix in ARROW:
        from .arrow_package import arrow

        arrow()
