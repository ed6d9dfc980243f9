"""Writes .npy and .safetensors files block by block, with torch alone."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from ..errors import InputError, UsageError
from ..spec.dtypes import dtype_name
from . import npy
from .tensor_table import DTYPES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class NpySink:
    """A .npy file: one array, `[rows, ...]`.

    bfloat16 becomes float32, since NumPy has no bfloat16.
    """

    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] = open(path, "wb")  # noqa: SIM115  # closed by `close`
        self._shape: tuple[int, ...] = ()
        self._dtype = torch.float32
        self._rows, self._begun = 0, False

    def write(self, columns: Mapping[str, Any]) -> None:
        if len(columns) != 1:
            raise UsageError(
                f"a .npy file has one array, and the answers are {', '.join(columns)}; write .safetensors, "
                ".parquet or .arrow, or choose one of them"
            )
        (values,) = columns.values()
        values = values.float() if values.dtype == torch.bfloat16 else values
        if not self._begun:
            self._shape, self._dtype, self._begun = tuple(values.shape[1:]), values.dtype, True
            self._file.write(npy.header_of(self._dtype, (0, *self._shape)))
        self._rows += values.shape[0]
        self._file.write(memory_of(values))

    def close(self) -> None:
        """Writes the number of rows, and closes the file."""
        self._file.seek(0)
        self._file.write(npy.header_of(self._dtype, (self._rows, *self._shape)))
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
            if values.dtype not in _NAMES:
                raise InputError(
                    f"{name} is {dtype_name(values.dtype)}, which a .safetensors file cannot hold"
                )
            shape = [self._rows, *values.shape[1:]]
            end = at + math.prod(shape) * values.element_size()
            header[name] = {"dtype": _NAMES[values.dtype], "shape": shape, "data_offsets": [at, end]}
            self._places[name] = at
            at = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._file.write(struct.pack("<Q", len(text)) + text)
        start = 8 + len(text)
        self._places = {name: start + place for name, place in self._places.items()}
        self._ends = {name: start + header[name]["data_offsets"][1] for name in self._places}

    def close(self) -> None:
        """Closes the file. Raises: InputError if the input had another number of rows than it said."""
        self._file.close()
        if self._places != self._ends:
            raise InputError("the input file changed while it was read: it has another number of rows now")


def memory_of(values: Tensor) -> bytearray:
    """Returns a copy of the numbers of a tensor as bytes, in row-major order."""
    found = bytearray(values.nbytes)
    if found:
        torch.frombuffer(found, dtype=values.dtype).view(values.shape).copy_(values)
    return found
