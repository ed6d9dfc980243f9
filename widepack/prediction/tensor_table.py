"""Reads .npy and .safetensors files block by block, with torch alone.

A block is read from the file into memory of its own. So the memory does not grow with the file, and a file
that another process shortens meanwhile gives an error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from widepack_artifacts import header as safetensors_header
from widepack_artifacts.errors import ArtifactError

from ..errors import InputError
from ..spec.dtypes import dtype_name
from . import npy
from .table import ColumnType

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""The dtypes of safetensors that an input can have."""
ARRAY = "array"
"""The name of the one column of a .npy file."""


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

    def values(self, name: str) -> tuple[list[Any], Tensor]:
        found, numbers = torch.unique(self._tensors[name], return_inverse=True)
        return found.tolist(), numbers

    def column(self, name: str) -> Any:
        return self._tensors[name]


class TensorTable:
    """An opened .npy or .safetensors file."""

    typed = True
    index: frozenset[str] = frozenset()

    def __init__(self, path: Path, tensors: Mapping[str, StoredTensor]) -> None:
        self.path = path
        self._tensors = tensors
        self._count = self._one_length()
        self.rows: int | None = self._count
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
        return self._count

    def position(self, rows: int) -> tuple[int, int]:
        return rows, self._count

    def blocks(
        self, names: Sequence[str], dtypes: Mapping[str, torch.dtype], rows: int
    ) -> Iterator[TensorBlock]:
        with open(self.path, "rb") as file:
            for first in range(0, max(1, self._count), rows):
                count = min(rows, self._count - first)
                try:
                    found = {name: self._tensors[name].read(file, first, count) for name in names}
                except EOFError:
                    raise InputError(f"{self.path}: the file became shorter while it was read") from None
                yield TensorBlock(first, count, found)


def open_npy(path: Path) -> TensorTable:
    """Opens a .npy file: a table with one column, `array`. Raises: InputError; OSError."""
    header = npy.read_header(path)
    return TensorTable(path, {ARRAY: StoredTensor(header.dtype, header.shape, header.start)})


def open_safetensors(path: Path) -> TensorTable:
    """Opens a .safetensors file: a table with a column for each tensor. Raises: InputError; OSError."""
    try:
        header = safetensors_header.read(path)
    except ArtifactError as e:
        raise InputError(str(e)) from None
    found = {}
    for name, extent in header.tensors.items():
        if extent.dtype not in DTYPES:
            raise InputError(f"{path}: the tensor {name} is {extent.dtype}, which no input takes")
        found[name] = StoredTensor(DTYPES[extent.dtype], tuple(extent.shape), header.start + extent.begin)
    return TensorTable(path, found)
