"""Reads and writes .npy and .safetensors files block by block. NumPy reads and writes the headers of .npy.

A block is read from the file into memory of its own. So the memory does not grow with the file, and a file
that another process shortens meanwhile gives an error.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from widepack_artifacts import header as safetensors_header
from widepack_artifacts.errors import ArtifactError
from widepack_artifacts.weights import CODES, NAMES

from ..errors import InputError, Unavailable, UsageError
from ..spec.dtypes import dtype_name, dtype_of
from .table import ColumnType

ARRAY = "array"
"""The name of the one column of a .npy file."""
_NPY_VERSIONS = (1, 2, 3)


class StoredTensor(NamedTuple):
    """A tensor of a file: its dtype, its shape, and the position of its first byte in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    def read(self, file: IO[bytes], first: int, rows: int) -> Tensor:
        """Reads some rows. Raises: EOFError if the file ends before them."""
        shape = (rows, *self.shape[1:])
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        memory = bytearray(rows * row_bytes)
        if not memory:
            return torch.empty(shape, dtype=self.dtype)
        file.seek(self.start + first * row_bytes)
        if file.readinto(memory) != len(memory):  # type: ignore[attr-defined]
            raise EOFError
        return torch.frombuffer(memory, dtype=self.dtype).view(shape)


class TensorBlock:
    """Consecutive rows of the tensors of a file."""

    def __init__(self, start: int, rows: int, tensors: Mapping[str, Tensor]) -> None:
        self.start, self.rows = start, rows
        self._tensors = tensors

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    def filled(self, name: str) -> tuple[Tensor, Tensor | None]:
        return self._tensors[name], None

    def values(self, name: str) -> tuple[list[Any], Tensor]:
        values, numbers = torch.unique(self._tensors[name], return_inverse=True)
        return values.tolist(), numbers

    column = tensor


class TensorTable:
    """An opened .npy or .safetensors file."""

    named = typed = True
    index: frozenset[str] = frozenset()

    def __init__(self, path: Path, tensors: Mapping[str, StoredTensor]) -> None:
        self.path = path
        self._tensors = tensors
        self.rows: int | None = self._one_length()
        self.columns: Mapping[str, ColumnType] = {
            name: ColumnType(f"{dtype_name(t.dtype)}{list(t.shape)}", dtype_name(t.dtype), t.shape[1:])
            for name, t in tensors.items()
        }

    def _one_length(self) -> int:
        """Returns the number of rows that all tensors have. Raises: InputError."""
        by_length: dict[int, str] = {}
        for name, stored in self._tensors.items():
            if not stored.shape:
                raise InputError(f"{self.path}: the tensor {name} is one number, and has no rows")
            by_length.setdefault(stored.shape[0], name)
        if len(by_length) > 1:
            (a, first), (b, second) = list(by_length.items())[:2]
            raise InputError(
                f"{self.path}: the tensor {first} has {a} rows, and {second} has {b}; every tensor of an "
                "input file has one row for each row of the others"
            )
        if not by_length:
            raise InputError(f"{self.path}: there is no tensor in this file")
        return next(iter(by_length))

    def count(self) -> int:
        assert self.rows is not None  # it is known from the start
        return self.rows

    def position(self, rows: int) -> tuple[int, int]:
        return rows, self.count()

    def blocks(
        self, names: Sequence[str], dtypes: Mapping[str, torch.dtype], rows: int
    ) -> Iterator[TensorBlock]:
        with open(self.path, "rb") as file:
            for first in range(0, max(1, self.count()), rows):
                count = min(rows, self.count() - first)
                try:
                    tensors = {name: self._tensors[name].read(file, first, count) for name in names}
                except EOFError:
                    raise InputError(f"{self.path}: the file became shorter while it was read") from None
                yield TensorBlock(first, count, tensors)


def numpy_format() -> Any:
    """Returns the module `numpy.lib.format`. Raises: Unavailable if NumPy is not installed."""
    try:
        import numpy.lib.format
    except ImportError as e:
        raise Unavailable(
            f".npy files need NumPy ({e}): pip install 'widepack[predict]'. Files of .safetensors need "
            "nothing more"
        ) from None
    return numpy.lib.format


def open_npy(path: Path) -> TensorTable:
    """Opens a .npy file: a table with one column, `array`. Raises: InputError; OSError; Unavailable."""
    npy = numpy_format()
    with open(path, "rb") as file:
        try:
            if (version := npy.read_magic(file)[0]) not in _NPY_VERSIONS:
                raise ValueError(f"it is of the unknown version {version}")
            # version 3 differs from 2 in the encoding of field names, and arrays with fields are refused
            read_header = npy.read_array_header_1_0 if version == 1 else npy.read_array_header_2_0
            shape, by_columns, dtype = read_header(file)
        except OSError:
            raise
        except Exception as e:  # noqa: BLE001  # NumPy raises any error for a damaged header
            words = " ".join(str(e).split())[:200]
            raise InputError(f"{path}: this is not a .npy file that NumPy reads: {words}") from None
        start, size = file.tell(), os.fstat(file.fileno()).st_size
    kind = _torch_dtype(dtype)
    if kind is None:
        raise InputError(
            f"{path}: its dtype is {dtype.str[:60]!r}; arrays of little-endian numbers are read, never "
            "Python objects. Save it in a dtype that torch has, such as float32 or int64"
        )
    if not shape:
        raise InputError(f"{path}: it holds one number; an input has rows along its first dim")
    if by_columns and len(shape) > 1:
        raise InputError(
            f"{path}: its numbers are in the order of Fortran, column by column; save "
            "numpy.ascontiguousarray(array)"
        )
    needed = math.prod(shape) * kind.itemsize
    if min(shape) < 0 or size - start != needed:
        raise InputError(
            f"{path}: {dtype_name(kind)}{list(shape)} has {needed:,} bytes, and the file holds "
            f"{size - start:,}: it is incomplete, or holds more than one array"
        )
    return TensorTable(path, {ARRAY: StoredTensor(kind, shape, start)})


def _torch_dtype(dtype: Any) -> torch.dtype | None:
    """Returns the dtype of torch for one of NumPy; None if there is none."""
    import numpy

    try:
        return torch.from_numpy(numpy.empty(0, dtype)).dtype
    except (TypeError, ValueError):
        return None


def open_safetensors(path: Path) -> TensorTable:
    """Opens a .safetensors file: a table with a column for each tensor. Raises: InputError; OSError."""
    try:
        header = safetensors_header.read(path)
    except ArtifactError as e:
        raise InputError(str(e)) from None
    tensors = {}
    for name, extent in header.tensors.items():
        if extent.dtype.startswith("F8"):
            raise InputError(f"{path}: the tensor {name} is {extent.dtype}, which no input takes")
        dtype = dtype_of(NAMES[extent.dtype])
        tensors[name] = StoredTensor(dtype, tuple(extent.shape), header.start + extent.begin)
    return TensorTable(path, tensors)


class NpySink:
    """A .npy file: one array, `[rows, ...]`.

    bfloat16 becomes float32, since NumPy has no bfloat16.
    """

    def __init__(self, path: Path) -> None:
        self._npy = numpy_format()
        self._file: IO[bytes] = open(path, "wb")  # noqa: SIM115  # closed by `close`
        self._header: dict[str, Any] = {}
        self._rows = 0

    def write(self, columns: Mapping[str, Any]) -> None:
        if len(columns) != 1:
            raise UsageError(
                f"a .npy file has one array, and the answers are {', '.join(columns)}; write .safetensors, "
                ".parquet or .arrow, or choose one of them"
            )
        (values,) = columns.values()
        values = values.float() if values.dtype == torch.bfloat16 else values
        if not self._header:
            descr = self._npy.dtype_to_descr(values[:0].numpy().dtype)
            self._header = {"descr": descr, "fortran_order": False, "shape": (0, *values.shape[1:])}
            self._npy.write_array_header_1_0(self._file, self._header)
        self._rows += values.shape[0]
        self._file.write(memory_of(values))

    def close(self) -> None:
        """Writes the number of rows, for which NumPy leaves space in the header, and closes the file."""
        if self._header:
            self._file.seek(0)
            shape = (self._rows, *self._header["shape"][1:])
            self._npy.write_array_header_1_0(self._file, {**self._header, "shape": shape})
        self._file.close()


class SafetensorsSink:
    """A .safetensors file: a tensor `[rows, ...]` for each column.

    Args:
        path: The file.
        rows: The number of rows that will be written.
        metadata: Texts for the header.
    """

    def __init__(self, path: Path, rows: int, metadata: Mapping[str, str]) -> None:
        self._file: IO[bytes] = open(path, "wb")  # noqa: SIM115  # closed by `close`
        self._rows, self._metadata = rows, metadata
        self._places: dict[str, int] = {}
        self._ends: dict[str, int] = {}

    def write(self, columns: Mapping[str, Any]) -> None:
        if not self._places:
            self._begin(columns)
        for name, values in columns.items():
            self._file.seek(self._places[name])
            self._file.write(memory_of(values))
            self._places[name] += values.nbytes

    def _begin(self, columns: Mapping[str, Tensor]) -> None:
        """Writes the header. Tensors with the largest numbers come first, so that all of them are aligned."""
        header: dict[str, Any] = {"__metadata__": dict(self._metadata)}
        at = 0
        for name, values in sorted(columns.items(), key=lambda c: -c[1].element_size()):
            dtype = dtype_name(values.dtype)
            if dtype not in CODES or dtype == "complex128":
                raise InputError(f"{name} is {dtype}, which a .safetensors file cannot hold")
            shape = [self._rows, *values.shape[1:]]
            end = at + math.prod(shape) * values.element_size()
            header[name] = {"dtype": CODES[dtype], "shape": shape, "data_offsets": [at, end]}
            at = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._file.write(struct.pack("<Q", len(text)) + text)
        for name in columns:
            begin, end = header[name]["data_offsets"]
            self._places[name], self._ends[name] = 8 + len(text) + begin, 8 + len(text) + end

    def close(self) -> None:
        """Closes the file. Raises: InputError if the input had another number of rows than it said."""
        self._file.close()
        if self._places != self._ends:
            raise InputError("the input file changed while it was read: it has another number of rows now")


def memory_of(values: Tensor) -> bytearray:
    """Returns a copy of the numbers of a tensor as bytes, in row-major order."""
    memory = bytearray(values.nbytes)
    if memory:
        torch.frombuffer(memory, dtype=values.dtype).view(values.shape).copy_(values)
    return memory
